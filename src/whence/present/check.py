"""Whether the data at hand is what the scores are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import Subset

from whence.data import Batches, Collate
from whence.scores import Scores


def check_data(
    scores: Scores,
    train: Any = None,
    query: Any = None,
    *,
    collate: Collate | None = None,
    contents: bool = True,
) -> list[str]:
    """Refuse data of another length, content or order than when the scores were made.

    Args:
        train: the training data, or `{stage: dataset}`; None is not checked.
        query: the queries; None is not checked.
        collate: the study's, if it had one: fingerprints are of batches.
        contents: False compares only lengths.

    Returns:
        What could not be checked, in sentences.
    """
    unchecked = []
    stages = by_stage(scores, train)
    known = scores.provenance.get("train") or {}
    several = len(stages) > 1
    for stage, dataset in stages.items():
        name = f"the training data of stage {stage!r}" if several else "the training data"
        ids = scores.train_ids
        if scores.stage is not None:
            ids = ids[np.array(scores.stage) == stage]
        _check_length(name, len(Batches(name, dataset)), ids)
        # a run without stages has one all the same, whose name the scores do not carry
        fingerprint = known.get(stage) if stage in known else _only(known)
        unchecked += _check_contents(scores, name, dataset, fingerprint, collate, contents)
    if query is not None:
        if scores.is_self_influence:
            raise ValueError(
                "query was given, but these are self-influence scores, which have no queries: "
                "leave it out"
            )
        _check_length("the query data", len(Batches("query", query)), scores.query_ids)
        fingerprint = scores.provenance.get("query")
        unchecked += _check_contents(
            scores, "the query data", query, fingerprint, collate, contents
        )
    return unchecked


def by_stage(scores: Scores, train: Any) -> dict[str | None, Any]:
    """The training data of each stage that the scores have; of the stage None if they name none."""
    if train is None:
        return {}
    names = [None] if scores.stage is None else list(dict.fromkeys(scores.stage))
    if isinstance(train, Mapping):
        if names == [None] and len(train) == 1:
            return {None: next(iter(train.values()))}
        missing = [name for name in names if name not in train]
        if missing:
            raise ValueError(
                f"train has the stages {sorted(train)}, but the scores are about {names}: give "
                "train={stage: dataset}"
            )
        return {name: train[name] for name in names}
    if len(names) > 1:
        raise ValueError(
            f"these scores are about the stages {names}: give train={{{names[0]!r}: dataset, ...}}"
        )
    return {names[0]: train}


def _only(known: Mapping[str, str]) -> str | None:
    return next(iter(known.values())) if len(known) == 1 else None


def _check_length(name: str, count: int, ids: np.ndarray) -> None:
    whole = np.array_equal(ids, np.arange(len(ids)))
    if (whole and count != len(ids)) or (len(ids) and int(ids.max()) >= count):
        about = f"{len(ids)} examples" if whole else f"examples up to number {int(ids.max())}"
        raise ValueError(
            f"{name} has {count} examples, but the scores are about {about}: give the data that "
            "the scores were made with, in the same order"
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
        return [f"The content and order of {name} were not checked, as asked."]
    if known is None:
        return [
            f"The content and order of {name} could not be checked: the scores carry no "
            "fingerprint of it."
        ]
    if scores.provenance.get("collated", False) != (collate is not None):
        given = "none was given" if collate is None else "one was given now"
        return [
            f"The content and order of {name} could not be checked: fingerprints are of batches, "
            f"and the study's collate function must be the same ({given}; pass study=)."
        ]
    data = Batches(name, dataset, collate)
    if data.fingerprint() == known:
        return []
    # A Hugging Face dataset's own fingerprint is taken for its content, but not by every method.
    if isinstance(getattr(dataset, "_fingerprint", None), str):
        same = Batches(name, Subset(dataset, range(len(dataset))), collate)
        if same.fingerprint() == known:
            return []
    random = "" if data.steady else "; it is random (augmented?), which alone would do it"
    raise ValueError(
        f"{name} is not what the scores were made with: its contents differ, or their order"
        f"{random}. Give the same data in the same order (check=False, or --no-check on the "
        "command line, shows it all the same)"
    )
