"""Documents of token ids: prompts with their completions, preferences, and batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whence.errors import InvalidInput
from whence.task import IGNORED

Tokens = Sequence[int] | Tensor


def completion(prompt: Tokens, answer: Tokens) -> dict[str, Tensor]:
    """A document of a prompt and its completion, whose loss is on the completion only.

    Args:
        prompt, answer: token ids. The last token of the prompt predicts the first of the answer.

    Returns:
        `input_ids` and `labels`, which are -100 on the prompt.
    """
    before, after = (torch.as_tensor(part, dtype=torch.long).flatten() for part in (prompt, answer))
    if not len(before) or not len(after):
        raise InvalidInput(
            f"a prompt of {len(before)} tokens and an answer of {len(after)}: both must have one. "
            "Use the token that documents begin with as the prompt of the others"
        )
    labels = torch.cat([torch.full_like(before, IGNORED), after])
    return {"input_ids": torch.cat([before, after]), "labels": labels}


def preference(
    prompt: Tokens, chosen: Tokens, rejected: Tokens, reference: float
) -> dict[str, Tensor]:
    """An example of `Preference`: two completions of a prompt, of which the first is preferred.

    Args:
        prompt, chosen, rejected: token ids.
        reference: log p(chosen) - log p(rejected) of the model that training started from.
    """
    sides = {"chosen_": completion(prompt, chosen), "rejected_": completion(prompt, rejected)}
    named = {side + name: x for side, document in sides.items() for name, x in document.items()}
    return named | {"reference": torch.tensor(float(reference), dtype=torch.float64)}


def padded(documents: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch of documents of different lengths, for `Study(collate=whence.padded)`.

    Args:
        documents: each with `input_ids`, and optionally `labels`; or a `preference`.

    Returns:
        `input_ids`, padded on the right with 0, `attention_mask`, and `labels`, -100 on padding.
    """
    batch: dict[str, Tensor] = {}
    for side in ("", "chosen_", "rejected_"):
        if f"{side}input_ids" in documents[0]:
            batch |= {side + name: x for name, x in _padded(documents, side).items()}
    if "reference" in documents[0]:
        batch["reference"] = torch.stack([torch.as_tensor(d["reference"]) for d in documents])
    return batch


def _padded(documents: Sequence[Mapping[str, Any]], side: str) -> dict[str, Tensor]:
    batch: dict[str, list[Tensor]] = {"input_ids": [], "attention_mask": [], "labels": []}
    longest = max(len(document[f"{side}input_ids"]) for document in documents)
    for document in documents:
        ids = torch.as_tensor(document[f"{side}input_ids"], dtype=torch.long)
        labels = torch.as_tensor(document.get(f"{side}labels", ids), dtype=torch.long)
        if labels.shape != ids.shape or ids.dim() != 1:
            raise InvalidInput(
                f"a document has input_ids of shape {tuple(ids.shape)} and labels of shape "
                f"{tuple(labels.shape)}: both must be lists of the same length"
            )
        space = 0, longest - len(ids)
        batch["input_ids"].append(F.pad(ids, space))
        batch["attention_mask"].append(F.pad(torch.ones_like(ids), space))
        batch["labels"].append(F.pad(labels, space, value=IGNORED))
    return {name: torch.stack(rows) for name, rows in batch.items()}
