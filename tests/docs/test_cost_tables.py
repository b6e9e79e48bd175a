"""Tables made of results are current, and costs are as the page counts them, by its own factors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import tables

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*left out")


@pytest.mark.parametrize(
    "page",
    ["cost", "distributed", "meaning", pytest.param("scale", marks=pytest.mark.slow)],
)
def test_tables_are_made_of_the_results(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    assert tables.MARKED.search(text)
    assert tables.filled(text) == text, "python -m tools.tables"


def test_time_is_as_counted() -> None:
    costs = tables.seconds()
    assert {c.kind for c in costs} == set(tables.AT_MOST)
    for c in costs:
        assert tables.AT_LEAST <= c.ratio <= tables.AT_MOST[c.kind], (c.what, c.ratio)


def test_operations_and_seconds_are_as_estimated() -> None:
    for what, r in tables.results("estimated")["cases"].items():
        for guessed, measured in r.values():
            assert 1 / 2 <= guessed / measured <= 2, (what, guessed / measured)


@pytest.mark.slow
def test_one_card_is_predicted() -> None:
    ratios = [guess / measured for _, guess, measured in tables.scale.comparisons()]
    assert sum(abs(ratio - 1) <= 0.3 for ratio in ratios) >= 0.7 * len(ratios)
    assert all(0.4 <= ratio <= 1.5 for ratio in ratios)


def test_memory_is_as_counted() -> None:
    low, high = tables.MEMORY
    for c in tables.memory():
        assert low <= c.ratio <= high, (c.what, c.ratio)


def test_the_page_states_the_factors() -> None:
    text = (ROOT / "docs/cost.md").read_text()
    assert "factor of three" in text and tables.AT_MOST["float32"] == 3
    for factor in tables.AT_MOST.values():
        assert f"| {factor:g} |" in text


def test_the_formulas_on_the_page_are_the_counts() -> None:
    """The table of operations, written out anew."""
    from whence.layers.kind import ParameterBlock
    from whence.operators import cost

    for o, i, t, q in ((10, 64, 1, 7), (96, 32, 12, 5), (8, 40, 100, 3)):
        block = ParameterBlock("0", o, i, bias=False, parameter="0.weight")
        assert cost.forward_backward(block, t) == 4 * t * o * i
        assert cost.covariance(block, t) == t * (i * i + o * o)
        several = min(t, o) * i * i + min(t, i) * o * o + t * o * i
        assert cost.squares(block, t) == 2 * (several if t > 1 else i * i + o * o + o * i)
        assert cost.inner(block, t, q) == 2 * o * i * (q + (t if t > 1 else 0))
        n, r = 16, 3
        assert cost.inner_by_position(n, t, o, i, q, r) == n * 2 * t * q * r * (o + i)
        assert cost.inner_expanded(n, t, o, i, q, r) == 2 * o * i * (n * t + n * q + q * r)
        assert sorted(cost.sides(block)) == sorted([i, o])
        assert cost.whole_grams(block, t) == 2 * t * o * i + o * i * (o + i)
        assert 2 * cost.rotate_queries(block, q) == 4 * q * o * i * (i + o)
