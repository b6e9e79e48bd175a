"""Check that data is what scores were computed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import Subset

from whence.data import Batches, Collate
from whence.errors import InvalidInput
from whence.scores import Scores


def check_data(
    scores: Scores,
    train: Any = None,
    query: Any = None,
    *,
    collate: Collate | None = None,
    contents: bool = True,
) -> list[str]:
    """Raise if the data differs in length, content or order from that of the scores.

    Args:
        train: the training data, or `{stage: dataset}`; None skips the check.
        query: the queries; None skips the check.
        collate: the study's, if it had one: fingerprints are of batches.
        contents: False compares only lengths.

    Returns:
        Sentences that say what could not be checked.
    """
    stages = by_stage(scores, train)
    fingerprints = scores.provenance.get("train") or {}
    # a run without stages has one whose name the scores do not carry
    only = next(iter(fingerprints.values())) if len(fingerprints) == 1 else None
    parts = []
    for stage, dataset in stages.items():
        name = f"the training data of stage {stage!r}" if len(stages) > 1 else "the training data"
        ids = scores.train_ids
        if scores.stage is not None:
            ids = ids[np.array(scores.stage) == stage]
        parts.append((name, dataset, ids, fingerprints.get(stage, only)))
    if query is not None:
        if scores.is_self_influence:
            raise InvalidInput(
                "query was given, but these are self-influence scores, which have no queries: "
                "leave it out"
            )
        fingerprint = scores.provenance.get("query")
        parts.append(("the query data", query, scores.query_ids, fingerprint))
    unchecked = []
    for name, dataset, ids, fingerprint in parts:
        _check_length(name, len(Batches(name, dataset)), ids)
        unchecked += _check_contents(scores, name, dataset, fingerprint, collate, contents)
    return unchecked


def by_stage(scores: Scores, train: Any) -> dict[str | None, Any]:
    """The training data by stage of the scores; {None: dataset} if they name no stage."""
    if train is None:
        return {}
    names = [None] if scores.stage is None else list(dict.fromkeys(scores.stage))
    if isinstance(train, Mapping):
        if names == [None] and len(train) == 1:
            return {None: next(iter(train.values()))}
        missing = [name for name in names if name not in train]
        if missing:
            raise InvalidInput(
                f"train has the stages {sorted(train)}, but the scores have {names}: give "
                "train={stage: dataset}"
            )
        return {name: train[name] for name in names}
    if len(names) > 1:
        raise InvalidInput(
            f"these scores have the stages {names}: give train={{{names[0]!r}: dataset, ...}}"
        )
    return {names[0]: train}


def _check_length(name: str, count: int, ids: np.ndarray) -> None:
    complete = np.array_equal(ids, np.arange(len(ids)))
    if (complete and count != len(ids)) or (len(ids) and int(ids.max()) >= count):
        expected = f"{len(ids)} examples" if complete else f"examples up to index {int(ids.max())}"
        raise InvalidInput(
            f"{name} has {count} examples, but the scores are of {expected}: give the data that "
            "the scores were computed from, in the same order"
        )


def _check_contents(
    scores: Scores,
    name: str,
    dataset: Any,
    known: str | None,
    collate: Collate | None,
    contents: bool,
) -> list[str]:
    if not contents:
        return [f"The content and order of {name} were not checked (check=False)."]
    if known is None:
        return [
            f"The content and order of {name} could not be checked: the scores have no "
            "fingerprint of it."
        ]
    if scores.provenance.get("collated", False) != (collate is not None):
        given = "none was given" if collate is None else "one was given now"
        return [
            f"The content and order of {name} could not be checked: fingerprints are of batches, "
            f"so the collate function must be the study's ({given}; pass study=)."
        ]
    data = Batches(name, dataset, collate)
    if data.fingerprint() == known:
        return []
    # Some methods take a Hugging Face dataset's own fingerprint for its content, others do not.
    if isinstance(getattr(dataset, "_fingerprint", None), str):
        by_content = Batches(name, Subset(dataset, range(len(dataset))), collate)
        if by_content.fingerprint() == known:
            return []
    random = "; it is random (augmented?), which explains the difference" if data.moving else ""
    raise InvalidInput(
        f"{name} is not what the scores were computed from: its content or order differs"
        f"{random}. Give the same data in the same order, or skip the check with check=False "
        "(--no-check on the command line)"
    )
