"""Near-duplicates, against all pairs compared one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import whence
from whence.present import duplicates
from whence.present.duplicates import SIMILAR, leaders, sketch
from whence.present.examples import Examples
from whence.present.views import TrainingExamples, folded


def groups(data: list[Any], **options: Any) -> list[int]:
    examples = Examples(data, **options)
    return leaders([sketch(examples.content(k)) for k in range(len(data))]).tolist()


def test_pictures_texts_and_rows() -> None:
    picture = torch.rand(3, 40, 30)
    brighter = (0.7 * picture + 0.2 + 0.01 * torch.rand(3, 40, 30)).clamp(0, 1)
    black, white = torch.zeros(1, 8, 8), torch.ones(1, 8, 8)
    assert groups([(picture, 1), (torch.rand(3, 40, 30), 1), (brighter, 1)]) == [0, 1, 0]
    assert groups([(picture, 1), (brighter, 2)]) == [0, 1]  # another label is a contradiction
    assert groups([(black, 0), (torch.rand(1, 8, 8), 0), (white, 0)]) == [0, 1, 0]
    text = "The quick brown fox jumps over the lazy dog near the river bank"
    other = "A slow green turtle walks under the busy bridge far from any river"
    assert groups([text, other, text.upper() + "!", text + " today"]) == [0, 1, 0, 0]
    row = {f"c{k}": k for k in range(12)}
    assert groups([row, row | {"c3": 99}, {f"c{k}": -k for k in range(12)}]) == [0, 0, 2]
    assert groups([1.0, "no text in common", picture]) == [0, 1, 2]


def test_whatever_cannot_be_compared_duplicates_nothing() -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("disk")

    with pytest.warns(UserWarning, match="not shown"):
        assert groups(Broken([1, 2])) == [0, 1]
    assert leaders([None, None]).tolist() == [0, 1]
    assert leaders([]).tolist() == []


@pytest.mark.parametrize("block", [1, 7, 2**24])
def test_groups_are_those_of_all_pairs(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "BLOCK", block)
    random = np.random.default_rng(0)
    centres = random.normal(size=(5, 1, 6, 6))
    noise = random.normal(size=(40, 1, 6, 6)) * random.uniform(0, 0.3, (40, 1, 1, 1))
    pictures = centres[random.integers(5, size=40)] + noise
    labels = random.integers(2, size=40)
    result = groups(list(zip(pictures, labels, strict=True)))
    flat = pictures.reshape(40, -1) - pictures.reshape(40, -1).mean(1, keepdims=True)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    expected: list[int] = []
    for k in range(40):
        alike = [
            j
            for j in range(k)
            if expected[j] == j and labels[j] == labels[k] and flat[j] @ flat[k] >= SIMILAR["image"]
        ]
        expected.append(alike[0] if alike else k)
    assert result == expected and 5 < len(set(result)) < 40


def test_lists_show_duplicates_once() -> None:
    data = [(text, 0) for text in ("one two three four", "five six", "one two three four")]
    scores = whence.Scores(
        np.zeros((1, 3)), method="M", measurement="loss", unit="nats", higher_is_better=False
    )
    entries = [{"column": c, "value": 3.0 - c} for c in (2, 1, 0)]
    shown = folded(entries, TrainingExamples.of_scores(scores, data).leaders)
    assert shown == [{"column": 2, "value": 1.0, "also": [0]}, {"column": 1, "value": 2.0}]
    assert folded([], TrainingExamples.of_scores(scores, data).leaders) == []
