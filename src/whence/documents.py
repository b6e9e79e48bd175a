"""Documents of token ids: prompts with their completions, preferences, groups of completions with
rewards, documents in packed rows, and batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whence.errors import InvalidInput, finite
from whence.sets import RowSet
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
    return named | {"reference": torch.tensor(finite("reference", reference), dtype=torch.float64)}


def group(
    prompt: Tokens, answers: Sequence[Tokens], rewards: Sequence[float], scaled: bool = True
) -> RowSet:
    """An example of `Averaged(LanguageModeling())`: completions of a prompt, with their rewards.

    The weights are advantages, as in GRPO: A = (r - mean r) / std r, divided by their number. The
    loss of the example is then -Σ A log p(answer) / k: that of an update whose completions are the
    model's own, before clipping.

    Args:
        prompt: token ids.
        answers: token ids of each completion.
        rewards: of each completion.
        scaled: whether rewards are divided by their standard deviation. Where all are the same,
            advantages are 0.
    """
    given = torch.as_tensor(rewards, dtype=torch.float64)
    if given.shape != (len(answers),) or len(answers) < 2 or not bool(given.isfinite().all()):
        raise InvalidInput(
            f"{len(answers)} answers with rewards {list(rewards)[:4]}: give at least two answers, "
            "and a finite reward for each"
        )
    advantages = given - given.mean()
    deviation = float(given.std())
    if scaled and deviation > 0:
        advantages = advantages / deviation
    return RowSet([completion(prompt, answer) for answer in answers], advantages / len(answers))


def unpacked(
    rows: Sequence[Mapping[str, Any]], documents: Sequence[Tokens], reduction: str = "mean"
) -> list[RowSet]:
    """The documents in packed rows, as examples of `Averaged(LanguageModeling())`.

    A document is the set of rows that it is in, each with a loss on the document's tokens only, and
    with the share that they have in the loss of the row. So the losses of all documents add up to
    those of all rows. Give these examples as `Study(candidates=...)`.

    Args:
        rows: with `input_ids`, and optionally `labels`.
        documents: for each row, the number of the document that each of its tokens is from.
        reduction: of the task: "mean" or "sum" over the tokens of a row.

    Returns:
        One example per document, in the order of their numbers.
    """
    if len(rows) != len(documents):
        raise InvalidInput(f"{len(rows)} rows, but documents of {len(documents)}: give both")
    sets: dict[int, tuple[list[Any], list[float]]] = {}
    for k, (row, numbers) in enumerate(zip(rows, documents, strict=True)):
        ids = torch.as_tensor(row["input_ids"], dtype=torch.long)
        labels = torch.as_tensor(row.get("labels", ids), dtype=torch.long)
        of = torch.as_tensor(numbers, dtype=torch.long)
        if of.shape != ids.shape or labels.shape != ids.shape:
            raise InvalidInput(
                f"row {k} has {len(ids)} tokens, {len(labels)} labels and {len(of)} numbers of "
                "documents: give one for each token"
            )
        counted = _predicted(labels)
        for number in sorted(set(of.tolist())):
            document_labels = labels.masked_fill(of != number, IGNORED)
            share = _predicted(document_labels) / max(1, counted) if reduction == "mean" else 1.0
            parts, weights = sets.setdefault(number, ([], []))
            parts.append({"input_ids": ids, "labels": document_labels})
            weights.append(share)
    return [RowSet(sets[k][0], torch.tensor(sets[k][1], dtype=torch.float64)) for k in sorted(sets)]


def _predicted(labels: Tensor) -> int:
    """Labels that have a loss: no token predicts the first."""
    return int((labels[1:] != IGNORED).sum())


def padded(documents: Sequence[Any]) -> Any:
    """A batch of documents of different lengths, for `Study(collate=whence.padded)`.

    Args:
        documents: each with `input_ids`, and optionally `labels`; or a `preference`; or a `RowSet`
            of documents, of which sets with fewer rows are filled up.

    Returns:
        `input_ids`, padded on the right with 0, `attention_mask`, and `labels`, -100 on padding.
    """
    if isinstance(documents[0], RowSet):
        return _padded_sets(documents)
    batch: dict[str, Tensor] = {}
    for side in ("", "chosen_", "rejected_"):
        if f"{side}input_ids" in documents[0]:
            batch |= {side + name: x for name, x in _padded(documents, side).items()}
    if "reference" in documents[0]:
        batch["reference"] = torch.stack([torch.as_tensor(d["reference"]) for d in documents])
    return batch


def _padded_sets(sets: Sequence[RowSet]) -> RowSet:
    most = max(len(row_set.rows) for row_set in sets)
    nothing = {"input_ids": torch.zeros(1).long(), "labels": torch.full((1,), IGNORED)}
    rows = [
        row for row_set in sets for row in [*row_set.rows, *[nothing] * (most - len(row_set.rows))]
    ]
    batch = {name: x.unflatten(0, (-1, most)) for name, x in padded(rows).items()}
    weights = [torch.as_tensor(row_set.weights) for row_set in sets]
    return RowSet(batch, torch.stack([F.pad(w, (0, most - len(w))) for w in weights]))


def _padded(documents: Sequence[Mapping[str, Any]], side: str) -> dict[str, Tensor]:
    rows = []
    for document in documents:
        ids = torch.as_tensor(document[f"{side}input_ids"], dtype=torch.long)
        labels = torch.as_tensor(document.get(f"{side}labels", ids), dtype=torch.long)
        if labels.shape != ids.shape or ids.dim() != 1:
            raise InvalidInput(
                f"a document has input_ids of shape {tuple(ids.shape)} and labels of shape "
                f"{tuple(labels.shape)}: both must be lists of the same length"
            )
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return filled_up(rows)


def filled_up(rows: Sequence[Mapping[str, Any]], pad: int = 0) -> dict[str, Tensor]:
    """A batch of rows whose lists are padded on the right: `input_ids` with `pad`, `labels` with
    -100, others with 0."""
    fill, batch = {"input_ids": pad, "labels": IGNORED}, {}
    for name in rows[0]:
        values = [torch.as_tensor(row[name]) for row in rows]
        if values[0].dim():
            longest, value = max(map(len, values)), fill.get(name, 0)
            values = [F.pad(x, (0, longest - len(x)), value=value) for x in values]
        batch[name] = torch.stack(values)
    return batch
