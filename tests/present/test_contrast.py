"""WCAG 2.2 AA contrast of the pages' colours, from the stylesheets, in both themes."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

TEXT, SHAPE = 4.5, 3.0  # the least contrast of text, and of charts, borders and focus
PLACES = ("page", "paper", "raised")
ON_TEXT = [(ink, on) for ink in ("ink", "muted", "helpful-ink", "harmful-ink") for on in PLACES]
ON_TEXT += [("ink", "notice"), ("ink", "shared"), ("muted", "shared"), ("on-action", "action")]
ON_TEXT += [("on-action", "action-hover")]
ON_SHAPE = [(shape, on) for shape in ("helpful", "harmful", "focus", "field") for on in PLACES]
MIXED = [
    ("helpful", 0.55),
    ("harmful", 0.55),
    ("helpful", 0.45),
    ("harmful", 0.45),
]  # cells, tokens


def colours(theme: str) -> dict[str, tuple[float, ...]]:
    """The variables of the root, in one theme."""
    sheet = (files("whence.present") / "static" / "whence.css").read_text("utf-8")
    root = sheet[sheet.index(":root {") : sheet.index("}")]
    given = dict(re.findall(r"--([\w-]+): (light-dark\(.*?\)|#\w+);", root))
    side = 0 if theme == "light" else -1
    hexes = {name: re.findall(r"#(\w{6})", value)[side] for name, value in given.items()}
    return {n: tuple(int(h[k : k + 2], 16) / 255 for k in (0, 2, 4)) for n, h in hexes.items()}


def luminance(colour: tuple[float, ...]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def test_the_formula_is_that_of_wcag() -> None:
    black, white, grey = (0.0,) * 3, (1.0,) * 3, (0x76 / 255,) * 3
    assert contrast(black, white) == pytest.approx(21)
    assert contrast(grey, white) == pytest.approx(4.54, abs=0.005)  # W3C's example, #767676


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_shapes_stand_out(theme: str) -> None:
    known = colours(theme)
    for least, pairs in ((TEXT, ON_TEXT), (SHAPE, ON_SHAPE)):
        weak = {p: contrast(known[p[0]], known[p[1]]) for p in pairs}
        assert {p: round(c, 2) for p, c in weak.items() if c < least} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("name", "share"), MIXED)
def test_text_on_coloured_cells_and_tokens(theme: str, name: str, share: float) -> None:
    known = colours(theme)
    pairs = zip(known[name], known["paper"], strict=True)
    behind = tuple(share * c + (1 - share) * p for c, p in pairs)
    assert contrast(known["ink"], behind) >= TEXT
    sheet = (files("whence.present") / "static" / "whence.css").read_text("utf-8")
    assert f"var(--{name}) calc(var(--weight) * {share:.0%})" in sheet
