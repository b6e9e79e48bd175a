"""What an attribution costs, counted before it starts: from shapes and counts, without weights.

    seconds = operations / (ATTAINED · rate) + TOUCHED · numbers / bandwidth + eigendecompositions

`operations` are those of the products (`operators/cost.py`), in tracked layers and all others.
`numbers` are what a pass handles: layer inputs, output gradients, results of products. Activations,
losses and copies read and write TOUCHED bytes for each. Both constants were fitted to the
measurements of `benchmarks/`; docs/scale.md compares.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from whence.layers.tracked import Tracked
from whence.operators import cost
from whence.operators.fit import accumulator, factor_bytes, grouped
from whence.progress import SCORES, expect
from whence.table import byte_size, duration

if TYPE_CHECKING:
    from whence.engine.query_factors import Plan
    from whence.engine.workspace import Workspace

ATTAINED = 0.85  # of the rate of one large product, by all products of a pass
# bytes read or written for each number that a pass handles; a CPU has larger caches
TOUCHED = {"cpu": 60.0, "cuda": 55.0}
SIDE_SECONDS = 1e-5  # of an eigendecomposition on a GPU, for each row, besides its operations
EIGEN_SHARE = 0.2  # of a GPU's float32 rate that float64 eigendecompositions attain
MIN_SHOWN_SECONDS = 10  # seconds
SCORED = ("scores", "norms")  # kinds of passes over the examples that are scored


@dataclass(frozen=True)
class Machine:
    """One device.

    Attributes:
        rate: operations per second of a large product.
        bandwidth: bytes per second of its memory.
        memory: bytes.
        network: bytes per second that it sends to other devices.
        eigen_rate, side_seconds: of eigendecompositions, operations per second and seconds a row.
        touched: bytes for each number that a pass handles.
    """

    rate: float
    bandwidth: float
    memory: float = 0.0
    network: float = 50e9
    eigen_rate: float = 0.0
    side_seconds: float = 0.0
    touched: float = TOUCHED["cuda"]

    @classmethod
    def here(cls, device: torch.device, dtype: torch.dtype) -> Machine:
        """This machine, whose speed is measured."""
        rate, bandwidth = cost.rate(device, dtype), cost.bandwidth(device)
        if device.type == "cpu":  # float64 at half the rate
            return cls(rate, bandwidth, eigen_rate=rate / 2, touched=TOUCHED["cpu"])
        single = cost.rate(device, torch.float32)
        return cls(rate, bandwidth, eigen_rate=EIGEN_SHARE * single, side_seconds=SIDE_SECONDS)

    def seconds(self, counts: Cost) -> dict[str, float]:
        """Seconds for each kind of work."""
        seconds = {
            kind: operations / (ATTAINED * self.rate)
            + self.touched * counts.touched.get(kind, 0.0) / self.bandwidth
            for kind, operations in counts.operations.items()
        }
        if counts.sides:
            cubes = 9.0 * sum(side**3 for side in counts.sides)
            eigen = cubes / self.eigen_rate + self.side_seconds * sum(counts.sides)
            seconds["eigendecomposition"] = eigen
        return seconds


@dataclass(frozen=True)
class Workload:
    """What the cost of an attribution depends on.

    Attributes:
        examples: number of scored examples.
        trained: number of examples that curvature is fitted on.
        queries: None for self-influence, where every example is its own query.
        terms: sets of query vectors, such as segments.
        scored, fitted: number of checkpoints at which examples are scored, and curvature is fitted.
        memory: bytes that a process may use.
        room: of these, for factors; None for as many as they need.
        ranks: processes that share the work.
        preconditioned: whether an Adam-type optimizer trained, so that curvature is applied by
            Krylov iterations.
    """

    tracked: Tracked
    examples: int
    trained: int
    queries: int | None
    terms: int
    scored: int
    fitted: int
    batch_size: int
    memory: int
    room: int | None
    dtype: torch.dtype
    query_rank: int | str | None = None
    ranks: int = 1
    preconditioned: bool = False

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator(self.dtype)

    @property
    def asked(self) -> int:
        """Queries that share a pass of products; 1 for self-influence."""
        return self.queries or 1

    @property
    def factor_groups(self) -> int:
        """The number of groups of layers in which EK-FAC's factors are fitted."""
        room = None if self.room is None else self.room * self.ranks
        return len(grouped(self.tracked.blocks, True, self.accumulator, room))

    @property
    def divided(self) -> bool:
        """Whether ranks exchange what each batch adds to the factors: no rank has room for those
        of all layers, or there is no device that they could leave (`Fitter._division`)."""
        needed = sum(factor_bytes(b, True, self.accumulator) for b in self.tracked.blocks)
        return self.ranks > 1 and (self.room is None or needed > self.room)


@dataclass(frozen=True)
class Cost:
    """An attribution in counts.

    Attributes:
        passes: over the data, of each kind.
        operations: of all examples, by kind.
        touched: numbers that the passes handle, by kind.
        fitted_numbers, vector_numbers, rate_numbers: numbers in memory at once, besides the model
            and a batch: of fitted factors, of query vectors, and of Adam's rates.
        sides: of all matrices that are decomposed.
        low_rank: how queries are taken in factors; None for whole vectors.
        query_passes: over the queries, one for each group of layers and checkpoint.
        together: queries whose whole vectors are taken together.
    """

    passes: Mapping[str, int]
    operations: Mapping[str, float]
    touched: Mapping[str, float] = field(default_factory=dict)
    fitted_numbers: int = 0
    vector_numbers: int = 0
    rate_numbers: int = 0
    sides: Sequence[int] = ()
    low_rank: Plan | None = None
    query_passes: int = 0
    together: int = 1


def estimated(workspace: Workspace, counts: Cost) -> dict[str, Any]:
    """What these counts take here: seconds, bytes, operations, and passes over the data."""
    seconds = Machine.here(workspace.device, workspace.dtype).seconds(counts)
    batch = min(workspace.batch_size, workspace.examples)
    numbers = counts.fitted_numbers + counts.vector_numbers + counts.rate_numbers
    size = workspace.accumulator.itemsize * numbers + workspace.dtype.itemsize * (
        workspace.tracked.parameters + batch * cost.per_example_numbers(workspace.tracked)
    )
    return {
        "seconds": sum(seconds.values()),
        "bytes": size,
        "operations": sum(counts.operations.values()),
        "passes": dict(counts.passes),
    }


def announce(what: object, workspace: Workspace, counts: Cost) -> None:
    """Note an estimate with the diagnostics, and show it if the work is long."""
    about = workspace.ledger.diagnostics["estimate"] = estimated(workspace, counts)
    if about["seconds"] > MIN_SHOWN_SECONDS:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in about["passes"].items())
        queries = "" if workspace.query is None else f", {len(workspace.query):,} queries"
        tqdm.write(
            f"{what!r}: {workspace.examples:,} examples{queries}; passes: {kinds}; "
            f"about {duration(about['seconds'])} and {byte_size(about['bytes'])}",
            file=sys.stderr,
        )


def show_progress(workspace: Workspace, counts: Cost) -> None:
    """Tell the bar of the call what these counts take here."""
    seconds = Machine.here(workspace.device, workspace.dtype).seconds(counts)
    expect(seconds, {k: 1 if k == SCORES else n for k, n in counts.passes.items()})


def passes_cost(
    tracked: Tracked,
    examples: int,
    work: Mapping[str, float],
    passes: Mapping[str, int],
    numbers: int = 0,
) -> Cost:
    """The cost of plain passes.

    Args:
        work: operations per example of each kind of pass.
        passes: how many of each kind.
        numbers: in memory at once, besides the model and a batch.
    """
    handled = cost.handled_numbers(tracked)
    return Cost(
        passes,
        {kind: examples * count * work[kind] for kind, count in passes.items()},
        {kind: examples * count * handled for kind, count in passes.items()},
        numbers,
    )
