"""`nn.Embedding` and `nn.EmbeddingBag`: rows of a table.

Inputs stay row numbers, and their covariance is a vector of counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence.errors import InvalidInput
from whence.layers.kind import Kind, Notes, Places, register
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
    """Bags of row numbers, summed, averaged, or their maximum. A bag is computed from its rows, and
    their lookups are noted; a study checks that the model's outputs stay the same."""

    module = nn.EmbeddingBag
    form = "lookup"
    seen = "forward"

    def refusal(self, module: nn.Module) -> str | None:
        return _changes_weights(module) or super().refusal(module)

    def inputs(self, module: nn.EmbeddingBag, x: Tensor) -> list[Rows]:
        padding = module.padding_idx
        weights = None if padding is None else (x != padding).to(module.weight.dtype)
        return [Rows(x, module.num_embeddings, weights)]

    def forward(self, host: Any, note: Notes, *args: Any, **kwargs: Any) -> Tensor:
        return _bags(host, note, *args, **kwargs)


def _bags(
    host: nn.EmbeddingBag,
    note: Notes,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """The rows of each bag together, (bags, o)."""
    ids, exist, each = input, None, per_sample_weights
    if input.dim() == 1:  # bags of all sizes, one after another
        if offsets is None:
            raise InvalidInput("a list of row numbers without offsets")
        starts = offsets[:-1] if host.include_last_offset else offsets
        order = torch.arange(len(input), device=input.device)
        bag = torch.searchsorted(starts, order, right=True) - 1
        place = order - starts[bag]
        shape = len(starts), int(place.max()) + 1 if len(place) else 1
        exist = torch.zeros(shape, dtype=torch.bool, device=ids.device)
        exist[bag, place] = True
        ids = input.new_zeros(shape).index_put((bag, place), input)
        if each is not None:
            each = each.new_zeros(shape).index_put((bag, place), each)
    if len(ids) % note.n:
        raise InvalidInput(f"{len(ids)} bags are not those of {note.n} examples")
    ids, places = ids.long(), None
    rows = F.embedding(ids, host.weight)
    mine = ids.view(note.n, -1)  # of each example
    if exist is None:
        exist = torch.ones_like(ids, dtype=torch.bool)
    else:
        numbers = torch.arange(mine.shape[1], device=ids.device).expand_as(mine)
        places = Places(numbers.where(exist.view_as(mine), -1), mine.shape[1])
    note("weight", mine, rows.view(*mine.shape, -1), places)
    if host.padding_idx is not None:
        exist = exist & (ids != host.padding_idx)
    present, count = exist.unsqueeze(2), exist.sum(1, keepdim=True)
    if host.mode == "max":
        highest = rows.where(present, -torch.inf).max(1).values
        return highest.where(count > 0, 0)
    rows = rows * (present if each is None else present * each.unsqueeze(2))
    return rows.sum(1) if host.mode == "sum" else rows.sum(1) / count.clamp_min(1)


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
