"""Cost of the work: operations and numbers in memory, per block and example.

The same counts choose between equivalent orders of multiplication, and give the estimate before
long work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial

import torch

from whence.layers.kind import ParameterBlock
from whence.layers.tracked import Tracked
from whence.table import Table


def basis_numbers(block: ParameterBlock) -> int:
    """Numbers in a block's eigenbases; as many operations rotate a vector of each side."""
    outputs = 0 if block.rows else block.o**2
    return outputs + (0 if block.diagonal else block.width**2)


def covariance(block: ParameterBlock, t: int) -> float:
    """Operations of both covariances of one example; symmetry halves them."""
    return t * basis_numbers(block)


def whole_grams(block: ParameterBlock, t: int) -> float:
    """Operations of G Gᵀ and Gᵀ G of one example, its gradient G included."""
    o, i = block.o, block.width
    if block.lookup:
        return float(t * i * i)
    t = t // 2 if block.tied else t  # the other half are looked up
    if block.tied and pairs_are_fewer(t, i):
        return 4.0 * t * t * o
    return float(2 * t * o * i + o * i * (i + (0 if block.rows else o)))


def pairs_are_fewer(t: int, i: int) -> bool:
    """Of a tied head: whether products of all pairs of t positions are less than G and Gᵀ G."""
    return 4 * t * t < 2 * t * i + i * i


def squares(block: ParameterBlock, t: int) -> float:
    """Operations of one example's squared gradient in the eigenbasis."""
    o, i = block.o, block.width
    if block.lookup:
        return 2.0 * t * i * (i + 1)
    if block.rows:
        return 2.0 * t * (o * i + (0 if block.diagonal else i * i))
    if t == 1:
        return 2.0 * (i * i + o * o + o * i)
    return 2.0 * (min(t, o) * i * i + min(t, i) * o * o + t * o * i)


def forward_backward(block: ParameterBlock, t: int) -> float:
    """Operations of the layer's own forward and backward pass, one example."""
    if block.lookup:
        return 2.0 * t * block.i
    return 4.0 * t * block.o * block.i


def inner(block: ParameterBlock, t: int, queries: int, factored: bool = False) -> float:
    """Operations of one example's inner products with the queries.

    `factored`: the queries' vectors are plain gradients; with one position, s_q a_qᵀ.
    """
    if block.lookup:
        return 2.0 * queries * t * block.width
    if factored and t == 1:
        return 2.0 * queries * (block.o + block.i)
    return 2.0 * block.o * block.width * (queries + (t if t > 1 else 0))


def inner_by_position(n: int, t: int, o: int, i: int, queries: int, rank: int) -> float:
    """Operations of n examples' inner products with queries in factors, position by position."""
    return 2.0 * n * t * queries * rank * (o + i)


def inner_expanded(n: int, t: int, o: int, i: int, queries: int, rank: int) -> float:
    """The same, after the factors were multiplied out for these n examples."""
    return 2.0 * o * i * (n * t + queries * rank + n * queries)


def low_rank_numbers(block: ParameterBlock, rank: int | None) -> int:
    """Numbers of a query's matrix: whole, or in factors where these are smaller."""
    return block.size if rank is None else min(block.size, rank * (block.o + block.width))


def rotate_examples(block: ParameterBlock, t: int, examples: int) -> float:
    """Operations of rotating the (a, s) of examples into a basis."""
    return 2.0 * examples * t * basis_numbers(block)


def rotate_queries(block: ParameterBlock, queries: int) -> float:
    """Operations of rotating whole (o, width) matrices into another basis."""
    return 2.0 * queries * block.size * ((0 if block.rows else block.o) + block.width)


def rotations(tracked: Tracked, queries: int, examples: int, sets: int = 1) -> float:
    """Operations of the queries' rotations: into the eigenbases of the last segment, from one
    segment's to the next one's, and in each of the `sets` segments back, or the examples' there."""
    total = 0.0
    for b in tracked.blocks:
        t, whole = tracked.positions[b.name], rotate_queries(b, queries)
        total += min(rotate_examples(b, t, queries), whole) + (sets - 1) * whole
        total += sets * min(rotate_examples(b, t, examples), whole)
    return total


def krylov(tracked: Tracked, queries: int, steps: int, examples: int) -> float:
    """Operations of this many products of whole matrices with D^½ H D^½: there and back.

    A side has at most as many eigenvalues above zero as the examples have positions; products skip
    the others (`operators.trimmed`).
    """
    total = 0.0
    for b in tracked.blocks:
        most = examples * tracked.positions[b.name]
        o, i = (min(side, most) for side in (b.o, b.width))
        if b.rows:
            total += b.size * i
        elif not b.diagonal:
            total += min(b.width * o * (b.o + i), b.o * i * (b.width + o))
    return 4.0 * queries * steps * total


def sides(block: ParameterBlock) -> list[int]:
    """Sides d of the two matrices that are decomposed: about 9 d³ operations each, in float64."""
    return [] if block.diagonal else [block.width] if block.rows else [block.o, block.width]


def products_along(block: ParameterBlock, t: int, queries: int) -> float:
    """Operations of one example's Gauss-Newton products: forward and back along each vector."""
    if block.lookup:
        return 4.0 * t * block.width * queries
    return 8.0 * block.size * t * queries


def products_by_columns(block: ParameterBlock, t: int, queries: int, outputs: int) -> float:
    """The same products, computed from one gradient per output."""
    if block.lookup:
        return 4.0 * t * block.width * outputs * queries
    return 4.0 * block.size * outputs * (t + queries)


def _captures(tracked: Tracked) -> int:
    return sum(tracked.positions[b.name] * (b.i + (0 if b.lookup else b.o)) for b in tracked.blocks)


def handled_numbers(tracked: Tracked) -> float:
    """Numbers that a pass handles of one example: layer inputs and output gradients that are
    captured, and results of the model's products."""
    return _captures(tracked) + tracked.computed


def per_example_numbers(tracked: Tracked) -> int:
    """Numbers in memory for one example during a pass: captures, temporaries, and outputs."""
    return 3 * _captures(tracked) + 6 * tracked.outputs


def batch_size_for(tracked: Tracked, dtype: torch.dtype, device: str, memory: int) -> int:
    """Examples per pass that fit, a power of two."""
    bytes_each = per_example_numbers(tracked) * dtype.itemsize
    most, share = (512, 2**28) if device == "cpu" else (4096, memory // 2)
    size = int(min(most, max(1, min(share, memory // 2) // bytes_each)))
    return 1 << (size.bit_length() - 1)


def queries_at_once(numbers: int, size: int, memory: int, sets: int) -> int:
    """Queries whose vectors fit into half the memory: those of `sets` terms, and two sets on the
    way to the next. 0 if not even one's do.

    Args:
        numbers: in a vector.
        size: bytes of each.
    """
    return int(memory // 2 // ((sets + 2) * numbers * size))


def in_groups(
    blocks: Iterable[ParameterBlock], size: Callable[[ParameterBlock], int], room: int | None
) -> list[list[ParameterBlock]]:
    """Blocks in order, as many at a time as there is room for; at least one."""
    groups: list[list[ParameterBlock]] = [[]]
    left = room
    for block in blocks:
        needed = size(block)
        if groups[-1] and left is not None and needed > left:
            groups.append([])
            left = room
        groups[-1].append(block)
        left = None if left is None else left - needed
    return groups


def vector_groups(
    tracked: Tracked, size: int, memory: int, factored: bool, joint: bool
) -> list[list[ParameterBlock]]:
    """The blocks that take turns: groups of which the vectors of one query fit.

    Args:
        size: bytes of a number.
        factored: whether vectors are plain gradients.
        joint: whether they are of all layers together, which then take no turns.
    """
    room = None if joint else queries_at_once(1, size, memory, 1)  # numbers of one query
    return in_groups(tracked.blocks, partial(vector_size, tracked, factored=factored), room)


def factor_numbers(tracked: Tracked, bases: bool = True) -> int:
    """Numbers in one segment's factors, with eigenbases or without."""
    return sum(basis_numbers(b) * bases + b.size for b in tracked.blocks)


def vector_numbers(tracked: Tracked, factored: bool = False) -> int:
    """Numbers in one vector over the tracked parameters.

    `factored`: it is a plain gradient; with one position, s aᵀ.
    """
    return sum(vector_size(tracked, block, factored) for block in tracked.blocks)


def vector_size(tracked: Tracked, block: ParameterBlock, factored: bool = False) -> int:
    """Numbers in one block of such a vector."""
    rank_one = factored and tracked.positions[block.name] == 1 and not block.lookup
    return block.o + block.width if rank_one else block.size


def again(tracked: Tracked) -> float:
    """Operations of one example in each further pass, for queries that did not fit into the first:
    a forward and backward pass, and its gradient."""
    return tracked.operations + sum(inner(b, tracked.positions[b.name], 0) for b in tracked.blocks)


def meeting_numbers(tracked: Tracked, queries: int, factored: bool = False) -> int:
    """Numbers on the way to one example's inner products, where a layer has one position: W a of
    every query, and its product with s."""
    single = (b for b in tracked.blocks if tracked.positions[b.name] == 1 and not b.lookup)
    return 0 if factored else 2 * queries * sum(b.o for b in single)


def pass_operations(
    tracked: Tracked,
    queries: int,
    factored: bool = False,
    whole: Collection[str] = (),
    columns: int = 1,
) -> dict[str, float]:
    """Operations per example of each kind of pass, the model's untracked parts included.

    Args:
        factored: whether queries' vectors are plain gradients.
        whole: blocks whose covariances are those of whole gradients.
        columns: backward passes of an example in the passes that fit curvature.
    """
    plain = tracked.operations
    statistics = dict.fromkeys(("covariances", "eigenvalues"), 0.0)
    products = dict.fromkeys(("scores", "sums", "products", "steps"), plain)
    for b in tracked.blocks:
        t = tracked.positions[b.name]
        statistics["covariances"] += (whole_grams if b.name in whole else covariance)(b, t)
        statistics["eigenvalues"] += squares(b, t)
        products["sums"] += 2 * inner(b, t, queries)
        for kind, count in (("products", queries), ("steps", 1)):
            products[kind] += min(
                products_along(b, t, count), products_by_columns(b, t, count, tracked.outputs)
            )
        products["scores"] += inner(b, t, queries, factored)
    fitting = {k: plain / 2 + columns * (plain / 2 + x) for k, x in statistics.items()}
    return {"norms": plain} | fitting | products


@cache
def rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measured operations per second of a matrix product, in a few hundredths of a second."""
    d = 1024 if device.type == "cpu" else 8192
    x = torch.full((d, d), 0.5, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        float((x @ x)[0, 0])
        best = min(best, time.perf_counter() - start)
    return 2.0 * d**3 / best


@cache
def bandwidth(device: torch.device) -> float:
    """Measured bytes per second of a copy, read and written, in a few hundredths of a second."""
    x = torch.full((2**24,), 0.5, device=device)
    y, best = torch.empty_like(x), float("inf")
    for _ in range(3):
        start = time.perf_counter()
        float(y.copy_(x)[0])
        best = min(best, time.perf_counter() - start)
    return 2.0 * x.nbytes / best


def table(tracked: Tracked, examples: int, title: str) -> Table:
    """The tracked layers, and the operations (in 10⁹) that one pass over the data takes."""
    rows = []
    for b in tracked.blocks:
        t = tracked.positions[b.name]
        cells = (covariance(b, t), squares(b, t), forward_backward(b, t))
        shape = f"{b.o} × {b.i}{'+1' if b.bias else ''}"
        billions = (examples * c / 1e9 for c in cells)
        costs = (f"{x:,.0f}" if x >= 100 else f"{x:.2g}" for x in billions)
        rows.append((b.name, shape, t, f"{b.size:,}", *costs))
    heads = ["layer", "o × i", "t", "parameters"]
    heads += ["GFLOP: covariances", "eigenvalues", "forward, backward"]
    return Table(heads, rows, title=title, note=tracked.summary(len(tracked.excluded)))
