"""The card of one query: what it contains, and that nothing in the data gets out of its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from support.browsing import EVIL

import whence
from whence.errors import InvalidInput
from whence.present.card import draw
from whence.present.examples import Examples
from whence.present.views import TrainingExamples, describe_query, fold_query, query_view

SVG = "{http://www.w3.org/2000/svg}"


def made(values: Any) -> whence.Scores:
    about = {"method": "Source", "measurement": "margin", "unit": "logits"}
    return whence.Scores(np.array(values), higher_is_better=True, **about)


def drawn(scores: whence.Scores, train: Any, query: Any, **options: Any) -> ElementTree.Element:
    examples = TrainingExamples.of_scores(scores, train, **options)
    view = fold_query(query_view(scores, 0, 10), examples.leaders)
    view = describe_query(view, Examples(query, **options))
    return ElementTree.fromstring(draw(view, examples.render, "Source, margin"))


def texts(root: ElementTree.Element) -> list[str]:
    return [str(node.text) for node in root.iter(f"{SVG}text")]


def test_pictures_are_in_the_order_of_their_scores() -> None:
    train = [(torch.rand(1, 8, 8), k) for k in range(4)]
    root = drawn(made([[1.0, 3.0, -2.0, -4.0]]), train, train[:1], classes=["a", "b", "c", "d"])
    assert len(list(root.iter(f"{SVG}image"))) == 5
    words = texts(root)
    assert [w for w in words if w in "abcd"] == ["a", "b", "a", "d", "c"]  # the query's label first
    assert words[-1] == "Training examples by Source, margin, traced with whence"


def test_text_of_the_data_stays_text() -> None:
    evil = EVIL + "\x00\x1b[31m ]]> &amp;"
    root = drawn(made([[1.0, -1.0]]), [(evil, 0), (evil, 1)], [(evil, 0)], classes=[evil, evil])
    assert {node.tag for node in root.iter()} == {SVG + t for t in ("svg", "rect", "text")}
    assert not any(name.startswith("on") for node in root.iter() for name in node.attrib)
    assert any("<script>" in text for text in texts(root))
    assert not any("\u202e" in text or "\x1b" in text for text in texts(root))


def test_rows_and_no_data_at_all(tmp_path: Path) -> None:
    train = [({"age": 3, "city": "Rome"}, 0), ({"age": 5, "city": "Oslo"}, 1)]
    assert "age 3, city Rome" in texts(drawn(made([[1.0, -1.0]]), train, train))
    card = made([[2.0, -1.0]]).card(0, title="A title")
    path = card.save(tmp_path / "card.svg")
    assert path.read_text() == card and card._repr_html_().startswith("<svg")
    assert {"A title", "#0", "#1"} <= set(texts(ElementTree.fromstring(card)))
    with pytest.raises(InvalidInput, match=r"card\.svg"):
        card.save(tmp_path / "card.png")
    with pytest.raises(InvalidInput, match="k=3"):
        made([[2.0, -1.0]]).card(0, k=3)
