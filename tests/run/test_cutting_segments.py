"""How a run is divided into segments, and the effective rate of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whence.run import Run

WEIGHTS = {"weight": torch.zeros(1), "bias": torch.zeros(1)}


def run(steps: list[int], rates: object = 0.1, **options: object) -> Run:
    states = [{name: t + step for name, t in WEIGHTS.items()} for step in steps]
    return Run.from_checkpoints(states, steps, rates, **options)  # type: ignore[arg-type]


def staged(counts: list[int]) -> Run:
    """A run with a number of checkpoints per stage, ten updates apart."""
    ends = np.cumsum(counts) * 10
    stages = {f"stage {i}": int(end) for i, end in enumerate(ends)}
    return run([10 * (i + 1) for i in range(sum(counts))], stages=stages)


def ends(segments: list) -> list[int]:
    return [s.end for s in segments]


def test_equal_segments_take_the_checkpoints_in_order() -> None:
    segments = run([5, 10, 15, 20, 25, 30]).segments(3)
    assert [(s.start, s.end, s.steps) for s in segments] == [
        (0, 10, 10),
        (10, 20, 10),
        (20, 30, 10),
    ]
    assert [[c.step for c in s.checkpoints] for s in segments] == [[5, 10], [15, 20], [25, 30]]
    assert [[c.step for c in s.checkpoints] for s in run([1, 2, 3, 4, 5]).segments(2)] == [
        [1, 2, 3],
        [4, 5],
    ]


def test_given_ends_and_stages() -> None:
    whole = run([5, 10, 20, 40], stages={"pre": 10, "fine": 40}, sizes={"pre": 7})
    assert ends(whole.segments([5, 10, 40])) == [5, 10, 40]
    by_stage = whole.segments("stages")
    assert [(s.stage.name, s.stage.size, s.end) for s in by_stage] == [
        ("pre", 7, 10),
        ("fine", None, 40),
    ]
    assert by_stage[1].stage == whole.stages[1]


def test_segments_are_shared_among_stages() -> None:
    # Equal parts if these respect the boundary; shares if they do not.
    assert ends(staged([2, 4]).segments(3)) == [20, 40, 60]
    assert ends(staged([1, 5]).segments(2)) == [10, 60]
    assert ends(staged([1, 5]).segments(4)) == [10, 30, 50, 60]
    assert ends(staged([3, 5]).segments(3)) == [30, 60, 80]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 28))
@settings(max_examples=150, deadline=None)
def test_any_division(counts: list[int], count: int) -> None:
    whole = staged(counts)
    if not len(counts) <= count <= sum(counts):
        with pytest.raises(ValueError, match=f"segments={count}"):
            whole.segments(count)
        return
    segments = whole.segments(count)
    assert len(segments) == count
    assert [c for s in segments for c in s.checkpoints] == whole.checkpoints
    assert [s.start for s in segments] == [0, *ends(segments)[:-1]]
    assert sum(s.steps for s in segments) == whole.steps
    for segment in segments:
        assert segment.end == segment.checkpoints[-1].step
        assert {c.stage for c in segment.checkpoints} == {segment.stage.name}
        assert segment.stage.start <= segment.start < segment.end <= segment.stage.end
    # The ends of these segments give the same segments.
    assert whole.segments(ends(segments)) == segments
    even = [len(part) for part in np.array_split(np.arange(sum(counts)), count)]
    if set(np.cumsum(counts)) <= set(np.cumsum(even)):
        assert [len(s.checkpoints) for s in segments] == even
        return
    # Within a stage as equal as can be; no stage has more than its share, rounded up, but for the
    # one segment that each is sure of.
    for stage, n in zip(whole.stages, counts, strict=True):
        lengths = [len(s.checkpoints) for s in segments if s.stage == stage]
        assert max(lengths) - min(lengths) <= 1
        assert len(lengths) == 1 or len(lengths) <= np.ceil(count * n / sum(counts))


@given(st.lists(st.floats(0, 1), min_size=12, max_size=12), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_mean_rates_times_lengths_add_up(rates: list[float], count: int) -> None:
    """Σ η̄K is the sum of all rates, however the run is cut."""
    segments = run([3, 6, 9, 12], rates).segments(count)
    assert sum(s.rate("weight") * s.steps for s in segments) == pytest.approx(sum(rates))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (4, "segments=4, but the run has only 3 checkpoints: use segments<=3, or record more"),
        (1, "2 stages and a segment never crosses a stage boundary: use segments>=2"),
        (0, "at least 1"),
        (True, "use a number"),
        (1.5, "use a number"),
        ("auto", "use a number"),
        (
            [5, 40],
            r"segments end at \[5\], where the run has no checkpoint: .* at \[10, 20, 40\]",
        ),
        ([10, 20], "must end with the run, at 40"),
        ([10, 40], "crosses the end of stage 'pre' at 20"),
        ([20, 20, 40], "must increase"),
        ([], "must end with the run"),
    ],
)
def test_refusals(spec: object, message: str) -> None:
    whole = run([10, 20, 40], stages={"pre": 20, "fine": 40})
    with pytest.raises(ValueError, match=message):
        whole.segments(spec)  # type: ignore[arg-type]


def test_effective_rate_of_sgd() -> None:
    rates = np.linspace(0.1, 0.4, 4)
    plain = run([2, 4], rates)
    assert [s.rate("weight") for s in plain.segments(2)] == pytest.approx([0.15, 0.35])
    heavy = run([2, 4], rates, momentum=0.9, dampening=0.5)
    assert heavy.segments(1)[0].rate("weight") == pytest.approx(0.25 * 0.5 / 0.1)
    # torch ignores dampening without momentum
    assert run([4], rates, dampening=0.5).segments(1)[0].rate("weight") == pytest.approx(0.25)
    cycled = run([4], rates, momentum=[0.9, 0.8, 0.7, 0.6])
    assert cycled.segments(1)[0].rate("weight") == pytest.approx(0.25 / (1 - 0.75))
    assert cycled.segments(1)[0].rate("elsewhere") == 0.0


def test_effective_rate_of_preconditioned_optimizers() -> None:
    for name in ("adam", "adamw"):
        segment = run([4], 0.2, momentum=0.9, optimizer=name).segments(1)[0]
        assert segment.rate("weight") == pytest.approx(0.2)
    # RMSprop's momentum buffer sums, as SGD's does
    segment = run([4], 0.2, momentum=0.5, optimizer="rmsprop").segments(1)[0]
    assert segment.rate("weight") == pytest.approx(0.4)


def test_momentum_multiplies_the_distance_travelled() -> None:
    """The effective rate against torch itself: a constant gradient, long after the start."""
    for options in (
        {"momentum": 0.8},
        {"momentum": 0.8, "nesterov": True},
        {"momentum": 0.8, "dampening": 0.3},
    ):
        p = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([p], lr=0.1, **options)  # type: ignore[arg-type]
        positions: list[Tensor] = []
        for _ in range(300):
            p.grad = torch.ones_like(p)
            optimizer.step()
            positions.append(p.detach().clone())
        travelled = float(positions[-2] - positions[-1])
        segment = run([4], 0.1, momentum=0.8, dampening=options.get("dampening", 0.0)).segments(1)[
            0
        ]
        assert segment.rate("weight") == pytest.approx(travelled)


def test_groups_have_their_own_rates() -> None:
    rates = np.array([[0.1, 1.0], [0.3, 2.0]])
    whole = run([1, 2], rates, groups=[["weight"], ["bias"]], momentum=0.5)
    (segment,) = whole.segments(1)
    assert segment.rate("weight") == pytest.approx(0.4)
    assert segment.rate("bias") == pytest.approx(3.0)
    assert whole.rate_at(whole.final, "bias") == 2.0
    assert whole.rate_at(whole.checkpoints[0], "weight") == 0.1
    assert whole.rate_at(whole.final, "frozen") == 0.0
    partly = run([1, 2], [0.1, 0.3], groups=[["weight"]])
    assert partly.segments(1)[0].rate("bias") == 0.0
