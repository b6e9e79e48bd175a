"""The tasks of language models: documents, and preferences between two completions.

`documents.py` makes their examples. Shapes: `n` examples, `t` positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whence.errors import InvalidInput, MissingKey, check_choice
from whence.task import (
    IGNORED,
    LABEL_KEYS,
    Draws,
    Task,
    as_tensor,
    class_numbers,
    draw,
    real,
    sample,
    unless,
)


class LanguageModeling(Task):
    """Next-token cross-entropy of a causal language model; one example is one document.

    Batches: a tensor of token ids (n, t), a tuple (ids,) or (ids, labels), or a mapping with
    `input_ids` and optionally `attention_mask` and `labels`. Labels default to the ids; -100 and
    padding have no loss. The logits at position t predict the label at t + 1. `completion` makes
    documents whose prompt has no loss. Documents longer than the model's context are refused.

    Args:
        reduction: "mean" or "sum" over a document's tokens, as in *training*.
        measurement: "loss" or "log_prob" (its negative).
    """

    def __init__(self, reduction: str = "mean", measurement: str = "loss") -> None:
        self.reduction = check_choice("reduction", reduction, ("mean", "sum"))
        self.measurement = check_choice("measurement", measurement, ("loss", "log_prob"))
        self.higher_is_better = measurement == "log_prob"
        self.unit = "nats per token" if reduction == "mean" else "nats per document"

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, (tuple, list)):
            batch = batch[0]
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        length = ids.shape[1] if isinstance(ids, Tensor) and ids.dim() == 2 else 0
        most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if isinstance(most, int) and length > most and _has_table(model, most):
            raise InvalidInput(
                f"documents of {length} tokens, but the model has {most} positions: cut each into "
                f"several documents of at most {most} tokens"
            )
        try:
            return super().outputs(model, batch)
        except IndexError as error:
            raise InvalidInput(
                f"the model failed ({error}) on documents of {length} tokens: it may have fewer "
                "positions, or no embedding for one of the token ids"
            ) from error

    def targets(self, batch: Any) -> Tensor:
        """Labels moved one position back, under the logits that predict them, (n, t)."""
        if isinstance(batch, Mapping):
            label_keys = [k for k in LABEL_KEYS if k in batch]
            labels = batch[label_keys[0]] if label_keys else batch["input_ids"]
        else:
            labels = batch[-1] if isinstance(batch, (tuple, list)) else batch
        mask = self.mask(batch)
        if mask is not None:
            labels = labels.masked_fill(mask == 0, IGNORED)
        moved = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return moved if mask is None else moved.masked_fill(mask == 0, IGNORED)

    def ignored(self, batch: Any) -> Tensor | None:
        """The documents without a token that has a loss, (n,)."""
        if type(self).losses is not LanguageModeling.losses:
            return None
        return (self.targets(batch) == IGNORED).all(1)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        targets, wrong = self._checked(outputs, batch)
        return unless(wrong, self._over_tokens(outputs, targets, lambda count: count))

    def _checked(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Targets (n, t); and which are wrong, if that is unknown."""
        targets = real(self.targets(batch))
        if outputs.dim() != 3 or targets.shape != outputs.shape[:2]:
            raise InvalidInput(
                f"labels of shape {tuple(targets.shape)} do not fit outputs of shape "
                f"{tuple(outputs.shape)}: LanguageModeling needs logits (n, t, tokens) and one "
                "label per position (n, t). Override outputs(model, batch) or targets(batch); sets "
                "of rows need Averaged(LanguageModeling())"
            )
        return class_numbers(targets, outputs.shape[2])

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        losses = self.losses(outputs, batch)
        return losses if self.measurement == "loss" else -losses

    def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Draws) -> Tensor:
        draws, mask = draw(uniform, outputs[..., 0]), self.mask(batch)
        if mask is not None:  # padding must not change a token's draw
            draws = draws.gather(1, (mask.cumsum(1) - 1).clamp_min(0))
        targets, _ = self._checked(outputs, batch)
        drawn = sample(outputs, draws).masked_fill(targets == IGNORED, IGNORED)
        # independent draws add their variances: Σ_t ℓ_t/√T has the Hessian of Σ_t ℓ_t/T
        return self._over_tokens(outputs, drawn, torch.sqrt)

    def _over_tokens(
        self, outputs: Tensor, targets: Tensor, normaliser: Callable[[Tensor], Tensor]
    ) -> Tensor:
        flat = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        sums = flat.reshape(targets.shape).sum(1)
        if self.reduction == "sum":
            return sums
        return sums / normaliser((targets != IGNORED).sum(1).clamp_min(1).to(sums.dtype))


class Preference(Task):
    """Direct preference optimisation (Rafailov et al., 2023); one example is a pair of completions.

        L = -log σ(β (h - h_ref))          h = log p(chosen) - log p(rejected)

    Batches are mappings with `chosen_input_ids`, `chosen_labels`, the same with `rejected_`, and
    optionally their `_attention_mask`, all (n, t); and `reference` (n,): h_ref, of the model that
    training started from. Labels are -100 on prompts and padding. `preference` makes examples, and
    `padded` batches of them. The curvature counts padding among the inputs of a layer.

    Args:
        beta: β.
        measurement: "margin", β (h - h_ref), or "loss".
    """

    def __init__(self, beta: float = 0.1, measurement: str = "margin") -> None:
        if isinstance(beta, bool) or not (isinstance(beta, (int, float)) and beta > 0):
            raise InvalidInput(f"beta={beta!r} must be a positive number")
        self.beta = float(beta)
        self.measurement = check_choice("measurement", measurement, ("margin", "loss"))
        self.higher_is_better = measurement == "margin"
        self.unit = "nats"

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        """h of each pair, (n, 1)."""
        sides = [self._log_probabilities(model, batch, side) for side in ("chosen", "rejected")]
        return (sides[0] - sides[1]).unsqueeze(1)

    def _log_probabilities(self, model: nn.Module, batch: Any, side: str) -> Tensor:
        needed = [f"{side}_input_ids", f"{side}_labels", "reference"]
        missing = [name for name in needed if not isinstance(batch, Mapping) or name not in batch]
        if missing:
            raise MissingKey(f"no {missing[0]} in the batch: make pairs with whence.preference")
        names = ("input_ids", "attention_mask")
        inputs = {n: batch[f"{side}_{n}"] for n in names if f"{side}_{n}" in batch}
        document = inputs | {"labels": batch[f"{side}_labels"]}
        task = LanguageModeling(reduction="sum", measurement="log_prob")
        return task.measurements(task.outputs(model, inputs), document)

    def targets(self, batch: Any) -> Tensor:
        """h_ref of each pair, (n,)."""
        return real(as_tensor(batch["reference"]))

    def margins(self, outputs: Tensor, batch: Any) -> Tensor:
        """β (h - h_ref), (n,)."""
        return self.beta * (outputs[:, 0] - self.targets(batch).to(outputs).flatten())

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        margins = self.margins(outputs, batch)
        return margins if self.measurement == "margin" else F.softplus(-margins)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.softplus(-self.margins(outputs, batch))


def _has_table(model: nn.Module, positions: int) -> bool:
    """Whether this many positions are a table, so that a longer document has none (some tables
    have two more rows). Rotary positions have no table."""
    tokens = getattr(model, "get_input_embeddings", lambda: None)()
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens)
    return any(table.num_embeddings in (positions, positions + 2) for table in tables)
