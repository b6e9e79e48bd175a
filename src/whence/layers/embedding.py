"""`nn.Embedding` and `nn.EmbeddingBag`: rows of a table.

Inputs stay row numbers, and their covariance is a vector of counts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whence.layers.kind import Kind, register
from whence.layers.rows import Rows

SCALED = "ScaledWordEmbedding"  # of transformers: rows times `embed_scale`


class Embedding(Kind):
    module = nn.Embedding
    form = "lookup"

    def refusal(self, module: nn.Module) -> str | None:
        scaled = type(module).__name__.endswith(SCALED) and hasattr(module, "embed_scale")
        return _changes_weights(module) or (None if scaled else super().refusal(module))

    def inputs(self, module: nn.Embedding, x: Tensor) -> list[Rows]:
        ids = x.reshape(len(x), -1).long()
        scale, padding = getattr(module, "embed_scale", None), module.padding_idx
        weights = None if padding is None else (ids != padding).to(module.weight.dtype)
        if scale is not None:
            weights = torch.ones_like(ids).to(module.weight) if weights is None else weights
            weights = weights * torch.as_tensor(scale, dtype=weights.dtype, device=ids.device)
        return [Rows(ids, module.num_embeddings, weights)]


class EmbeddingBag(Kind):
    """Bags (n, size) of row numbers, summed or averaged; a padding row counts in neither."""

    module = nn.EmbeddingBag
    form = "lookup"

    def refusal(self, module: nn.Module) -> str | None:
        assert isinstance(module, nn.EmbeddingBag)
        if module.mode == "max":
            return "the maximum over a bag is not linear in the rows"
        return _changes_weights(module) or super().refusal(module)

    def inputs(self, module: nn.EmbeddingBag, x: Tensor) -> list[Rows]:
        ids = x.reshape(len(x), -1).long()
        weights = torch.ones_like(ids, dtype=module.weight.dtype)
        if module.padding_idx is not None:
            weights = weights * (ids != module.padding_idx)
        if module.mode == "mean":
            weights = weights / weights.sum(1, keepdim=True).clamp_min(1)
        return [Rows(ids, module.num_embeddings, weights)]


def _changes_weights(module: nn.Module) -> str | None:
    if getattr(module, "max_norm", None) is not None:
        return "its max_norm changes rows of the weight in the forward pass"
    if getattr(module, "sparse", False):
        return "it was trained with sparse gradients, of which optimizers update only some rows"
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq makes a gradient depend on the rest of the batch"
    return None


register(Embedding())
register(EmbeddingBag())
