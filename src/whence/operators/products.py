"""The heavy arithmetic on (a, s): pure functions of tensors.

Letters: `n` examples, `q` queries, `t` positions, `i` inputs, `o` outputs; a is (n, t, i), s is (n,
t, o), and the per-example gradient Σ_t s_t a_tᵀ is (o, i), with a last column Σ_t s_t when there is
a bias. The bias coordinate is never concatenated to `a`; its terms are added separately. `width` is
i, plus one with a bias. An embedding's `s` is `Rows`, which is never formed.

`operators/cost.py` counts the cost of each product. Where two orders of multiplication give the
same result, these functions choose the one with fewer operations.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whence.layers.capture import LayerFactors, Outputs, whole_gradients
from whence.layers.rows import Rows, add_rows
from whence.operators import cost
from whence.operators.operator import Basis

#: numbers in a scratch buffer that is read back immediately (it should stay in a CPU's cache) ...
SMALL = {"cpu": 1 << 18, "cuda": 1 << 27}
#: ... or that feeds one large product (it should be wide enough for the product to run fast)
LARGE = {"cpu": 1 << 22, "cuda": 1 << 28}
#: results of a product of very long rows, up to which it would leave most of a GPU idle
FEW = 1 << 16
#: (number of row blocks, least height of one) in which a symmetric product is computed
ROW_BLOCKS = {"cpu": (8, 128), "cuda": (4, 1024)}
#: of the search for leading singular vectors
OVERSAMPLED, SUBSPACE_ITERATIONS = 8, 2


_local = threading.local()


def buffer(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory that the next call in this thread overwrites.

    On a CPU, allocating a large tensor costs more than computing the product written to it. A GPU's
    allocator reuses memory by itself.
    """
    if like.device.type != "cpu":
        return like.new_empty(shape)
    size, name = math.prod(shape), str(like.dtype)
    scratch: Tensor | None = getattr(_local, name, None)
    if scratch is None or scratch.numel() < size:
        scratch = torch.empty(size, dtype=like.dtype)
        setattr(_local, name, scratch)
    return scratch[:size].view(shape)


def add_gram(total: Tensor, x: Tensor) -> None:
    """total += xᵀx for x (m, d), upper triangle, by row blocks: about half of the full product."""
    d = x.shape[1]
    blocks, least = ROW_BLOCKS.get(x.device.type, ROW_BLOCKS["cuda"])
    step = max(least, -(-d // blocks))
    for start in range(0, d, step):
        stop = min(start + step, d)
        _add_product(total[start:stop, start:], x[:, start:stop].T, x[:, start:])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:  # low-precision products are summed up in the accumulator's precision
        total.add_(left @ right)


def mirror(total: Tensor) -> Tensor:
    """The whole symmetric matrix from its upper triangle."""
    return torch.triu(total) + torch.triu(total, 1).mT


def add_input_covariance(total: Tensor, factors: LayerFactors) -> None:
    """total (width, width) += Σ_{n,t} [a, 1][a, 1]ᵀ over existing positions; upper triangle."""
    n, t = factors.s.shape[:2]
    i, count = factors.block.i, float(n * t)
    sums = factors.add_gram(total[:i, :i]) if factors.mask is None else None
    if sums is None:
        x = factors.a.reshape(n * t, i)
        if factors.mask is not None:
            x = x * factors.mask.reshape(-1, 1)
            count = float(factors.mask.sum())
        add_gram(total[:i, :i], x)
        sums = x.sum(0)
    if factors.block.bias:
        total[:i, i] += sums
        total[i, i] += count


def add_output_covariance(total: Tensor, s: Outputs, mask: Tensor | None) -> float:
    """total (o, o) += Σ_{n,t} s sᵀ, upper triangle; returns how many positions exist.

    A total (o,) gets the diagonal only: of a lookup, how often each row was looked up.
    """
    n, t, o = s.shape
    if isinstance(s, Rows):
        ones = torch.ones_like(s.ids, dtype=total.dtype) if mask is None else mask.to(total.dtype)
        add_rows(total, s.ids.flatten(), ones.flatten())
    else:
        x = s.reshape(n * t, o)
        if mask is not None:
            x = x * mask.reshape(-1, 1)
        if total.dim() == 1:
            total += x.square().sum(0, dtype=total.dtype)
        else:
            add_gram(total, x)
    return float(n * t) if mask is None else float(mask.sum())


def add_whole_grams(left: Tensor, right: Tensor, a: Tensor, s: Outputs, bias: bool) -> None:
    """left (o, o) += Σ_n G_n G_nᵀ and right (width, width) += Σ_n G_nᵀ G_n; upper triangles.

    A left (o,) gets the diagonal only.
    """
    n, o, width = len(a), len(left), len(right)
    if isinstance(s, Rows) and s.dense is None:
        rows = s.merged(a).flatten(0, 1)
        add_gram(right, rows)
        add_rows(left, s.ids.flatten(), rows.square().sum(1))
        return
    if (
        isinstance(s, Rows)
        and s.dense is not None
        and cost.pairs_are_fewer(s.dense.shape[1], width)
    ):
        step = max(1, LARGE.get(a.device.type, LARGE["cuda"]) // (s.dense.shape[1] * o))
        for start in range(0, n, step):
            _add_grams_by_position(left, right, a[start : start + step], s[start : start + step])
        return
    step = max(1, LARGE.get(a.device.type, LARGE["cuda"]) // (2 * o * width))
    for start in range(0, n, step):
        gradient = build(a[start : start + step], s[start : start + step], None, bias)
        add_gram(right, gradient.reshape(-1, width))
        if left.dim() == 1:
            left += gradient.square().sum((0, 2), dtype=left.dtype)
        else:
            add_gram(left, gradient.mT.reshape(-1, o))


def _add_grams_by_position(left: Tensor, right: Tensor, a: Tensor, s: Rows) -> None:
    """The same, left (o,), without any G: aᵀ (s sᵀ) a and the diagonal of sᵀ (a aᵀ) s."""
    assert s.dense is not None
    a, ids, dense = a.to(left.dtype), s.ids, s.dense.to(left.dtype)
    (n, t), last = ids.shape, s.dense.shape[1]
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)).to(a.dtype)
    mixed = dense.gather(2, ids.unsqueeze(1).expand(n, last, t))  # s of a position in the row of
    outputs = a.new_empty(n, t + last, t + last)  # one that is looked up: (n, t₂, t₁)
    outputs[:, :t, :t], outputs[:, t:, :t], outputs[:, :t, t:] = same, mixed, mixed.mT
    torch.bmm(dense, dense.mT, out=outputs[:, t:, t:])
    right.addmm_(a.flatten(0, 1).T, (outputs @ a).flatten(0, 1))
    inputs = a @ a.mT
    looked_up = (inputs[:, :t, :t] * same).sum(2) + 2 * (inputs[:, :t, t:] * mixed.mT).sum(2)
    squares = (inputs[:, t:, t:] @ dense).mul_(dense).sum(1)  # (n, o)
    places = ids + torch.arange(n, device=a.device).unsqueeze(1) * s.o
    add_rows(squares.view(-1), places.flatten(), looked_up.flatten())
    left += squares.clamp_min_(0).sum(0)  # which rounding errors make negative


def add_squares(total: Tensor, a: Tensor, s: Outputs, basis: Basis | None, bias: bool) -> None:
    """total (o, width) += Σ_n (Q_Sᵀ G_n Q_A)², G_n the whole gradient of example n (Eq. 36)."""
    t, (o, width) = a.shape[1], total.shape
    if isinstance(s, Rows):
        _add_squared_rows(total, a if basis is None else basis.rotate_inputs(a), s)
        return
    if t == 1:  # rank one: the square of a product is the product of squares
        left = (s if basis is None else basis.rotate_outputs(s)).squeeze(1).square()
        right = (a if basis is None else basis.rotate_inputs(a)[..., :width]).squeeze(1).square()
        _add_product(total[:, : right.shape[1]], left.T, right)
        if basis is None and bias:
            total[:, -1] += left.sum(0)
        return
    n, _, i = a.shape
    inputs_first = t < o  # rotate before or after summing over positions, whichever has fewer rows
    outputs_first = t < i or (basis is not None and basis.outputs is None)
    column = s.sum(1) if bias else None  # the bias's gradients, (n, o)
    if basis is not None and inputs_first:
        a, column = basis.rotate_inputs(a), None
    if basis is not None and outputs_first:
        s = basis.rotate_outputs(s)
    if basis is not None and column is not None:
        column = column if basis.outputs is None else column @ basis.outputs
    step = max(1, SMALL.get(a.device.type, SMALL["cuda"]) // (o * width))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        gradient = torch.bmm(s[rows].mT, a[rows], out=buffer(a, rows.stop - start, o, a.shape[2]))
        if basis is not None and not outputs_first:
            assert basis.outputs is not None
            gradient = basis.outputs.mT @ gradient
        if basis is not None and not inputs_first:
            gradient = (gradient.view(-1, i) @ basis.inputs[:i]).view(len(gradient), o, -1)
            if column is not None:
                gradient += column[rows].unsqueeze(2) * basis.inputs[i]
        _add_squared(total[:, : gradient.shape[2]], gradient)
    if basis is None and column is not None:
        total[:, -1] += column.square().sum(0).to(total.dtype)


def _add_squared_rows(total: Tensor, a: Tensor, s: Rows) -> None:
    """total (o, i) += Σ_n (Σ_t s_t a_tᵀ)²."""
    if s.dense is None:
        add_rows(total, s.ids.flatten(), s.merged(a).square_().flatten(0, 1))
        return
    step = max(1, SMALL.get(a.device.type, SMALL["cuda"]) // total.numel())
    for start in range(0, len(a), step):
        _add_squared(total, s[start : start + step].outer(a[start : start + step]))


def _add_squared(total: Tensor, gradient: Tensor) -> None:
    """total (o, i) += Σ_n gradient². The gradients (n, o, i) may have more columns, of padding, and
    are overwritten."""
    if gradient.device.type != "cpu":  # reads them once, and writes no squares
        gradient = torch.linalg.vector_norm(gradient, dim=0, keepdim=True, dtype=total.dtype)
    gradient = gradient[..., : total.shape[1]]
    if len(gradient) == 1 and total.dtype == gradient.dtype:
        total.addcmul_(gradient[0], gradient[0])
    else:
        total += gradient.square_().sum(0, dtype=total.dtype)


def build(a: Tensor, s: Outputs, basis: Basis | None, bias: bool) -> Tensor:
    """Whole per-example gradients (n, o, width), in the basis."""
    if isinstance(s, Rows):
        return s.outer(a if basis is None else basis.rotate_inputs(a))
    if basis is not None:
        gradient = basis.rotate_outputs(s).mT @ basis.aligned().rotate_inputs(a)
        return gradient[..., : len(basis.inputs)]
    return whole_gradients(a, s, bias)


def add_weighted(total: Tensor, weights: Tensor, a: Tensor, s: Outputs, bias: bool) -> None:
    """total (q, o, width) += Σ_n weights[q, n] G_n, G_n the whole gradient of example n."""
    if isinstance(s, Rows):
        looked_up, a = s.split(a)
        for matrix, row in zip(total, weights.to(a.dtype), strict=True):
            add_rows(matrix, s.ids.flatten(), (row[:, None, None] * looked_up).flatten(0, 1))
        if s.dense is None:
            return
        s = s.dense
    (n, t, i), o, weights = a.shape, s.shape[2], weights.to(a.dtype)
    if bias:
        total[..., i] += weights @ s.sum(1)
    if t > 1:  # Σ_t s_t a_tᵀ once per example, a few outputs at a time, for all q
        step = max(1, LARGE.get(a.device.type, LARGE["cuda"]) // (n * i))
        for start in range(0, o, step):
            rows = slice(start, min(start + step, o))
            gradient = buffer(a, n, rows.stop - start, i)
            torch.bmm(s[:, :, rows].mT, a, out=gradient)
            total[:, rows, :i] += (weights @ gradient.view(n, -1)).view(len(weights), -1, i)
        return
    a, s = a.squeeze(1), s.squeeze(1)
    short, long = (s, a) if o <= i else (a, s)  # the weights go to the shorter side
    step = max(1, SMALL.get(a.device.type, SMALL["cuda"]) // short.numel())
    for start in range(0, len(weights), step):
        part = weights[start : start + step]
        weighted = torch.mul(part.unsqueeze(1), short.mT, out=buffer(a, len(part), *short.mT.shape))
        sums = (weighted.view(-1, n) @ long).view(len(part), short.shape[1], -1)
        total[start : start + step, :, :i] += sums if o <= i else sums.mT


def _inner(weight: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ_oi weight[q, o, i] gradient[n, o, i], (q, n)."""
    q, n = len(weight), len(gradient)
    if weight.device.type == "cpu" or q * n > FEW:
        return (weight.reshape(q, -1) @ gradient.view(n, -1).mT).to(dtype)
    by_output = torch.bmm(weight.transpose(0, 1), gradient.permute(1, 2, 0))  # (o, q, n)
    return by_output.sum(0, dtype=dtype)


def squared_norms(a: Tensor, s: Outputs, bias: bool) -> Tensor:
    """‖G_n‖², (n,)."""
    (n, t, i), o = a.shape, s.shape[2]
    if isinstance(s, Rows) and s.dense is None:
        return s.merged(a).square_().sum((1, 2), dtype=torch.promote_types(a.dtype, torch.float32))
    gram = (
        not isinstance(s, Rows) and t * (i + o) <= o * i
    )  # Σ_{t,t'} (s_t · s_t')(a_t · a_t' + 1) is less than Σ_t s_t a_tᵀ
    step = max(1, SMALL.get(a.device.type, SMALL["cuda"]) // (t * t if gram else o * i))
    wide = torch.promote_types(a.dtype, torch.float32)
    norms = []
    for start in range(0, n, step):
        x, y = a[start : start + step], s[start : start + step]
        if gram and isinstance(y, Tensor):
            products = (y @ y.mT) * (x @ x.mT + bias)
        else:
            products = build(x, y, None, bias).square()
        norms.append(products.sum((1, 2), dtype=wide))
    return torch.cat(norms)


def leading(values: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Matrices (q, o, width) ≈ leftᵀ right, from left (q, r, o), orthonormal, and right (q, r,
    width): their leading singular vectors, by subspace iteration from a fixed start.

    What is lost of ‖values‖² is ‖values‖² - ‖right‖².
    """
    o, width = values.shape[1:]
    columns = min(rank + OVERSAMPLED, o, width)
    generator = torch.Generator().manual_seed(columns)
    start = torch.randn(width, columns, generator=generator, dtype=torch.float64)
    span = torch.linalg.qr(values @ start.to(values))[0]
    for _ in range(SUBSPACE_ITERATIONS):
        span = torch.linalg.qr(values @ torch.linalg.qr(values.mT @ span)[0])[0]
    inside = span.mT @ values  # (q, columns, width)
    vectors = torch.linalg.eigh(inside.double() @ inside.double().mT)[1]
    chosen = vectors[..., -min(rank, columns) :].flip(2).to(values)
    return (span @ chosen).mT.contiguous(), chosen.mT @ inside


@dataclass(frozen=True)
class Readout:
    """q linear functionals of a block's gradient, ready to be applied to many examples.

    `weight` (q, o, columns) is in `basis` (columns = width), or in the parameters' own coordinates
    (columns = i, and `column` (q, o) for the bias).
    """

    weight: Tensor
    column: Tensor | None
    basis: Basis | None

    @classmethod
    def of(cls, values: Tensor, basis: Basis | None, bias: bool, dtype: torch.dtype) -> Readout:
        values = values.to(dtype)
        if basis is None and bias:
            return cls(values[..., :-1].contiguous(), values[..., -1].contiguous(), None)
        return cls(values.contiguous(), None, basis and basis.to(values.device, dtype))

    def of_rows(self, take: Callable[[Tensor, int], Tensor]) -> Readout:
        """The part of some outputs, in the parameters' own coordinates."""
        assert self.basis is None
        column = None if self.column is None else take(self.column, 1)
        return Readout(take(self.weight, 1), column, None)

    def of_columns(self, take: Callable[[Tensor, int], Tensor]) -> Readout:
        """The part of some inputs, without the bias, in the parameters' own coordinates."""
        assert self.basis is None
        return Readout(take(self.weight, 2), None, None)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Readout:
        """With a function of the queries' rows in their place."""
        column = None if self.column is None else function(self.column)
        return replace(self, weight=function(self.weight), column=column)

    def scaled(self, factor: float) -> Readout:
        column = None if self.column is None else self.column * factor
        return Readout(self.weight * factor, column, self.basis)

    def _rotated(self, a: Tensor, s: Outputs) -> tuple[Tensor, Outputs]:
        if self.basis is None:
            return a, s
        a = self.basis.rotate_inputs(a)
        return a, s if isinstance(s, Rows) else self.basis.rotate_outputs(s)

    def add_inner(self, total: Tensor, a: Tensor, s: Outputs) -> None:
        """total (q, n) += ⟨W_q, G_n⟩."""
        a, s = self._rotated(a, s)
        if isinstance(s, Rows):
            looked_up, a = s.split(a)
            for inner, table in zip(total, self.weight, strict=True):
                inner += (table[s.ids] * looked_up).sum((1, 2), dtype=total.dtype)
            if s.dense is None:
                return
            s = s.dense
        if self.column is not None:
            total += (self.column @ s.sum(1).mT).to(total.dtype)
        if a.shape[1] == 1:
            self._add_rank_one(total, a.squeeze(1), s.squeeze(1))
        else:
            self._add_summed(total, a, s)

    def _add_rank_one(self, total: Tensor, a: Tensor, s: Tensor) -> None:
        """sᵀ W_q a, the longer side first, without ever building an (n, o, i)."""
        q, o, i = self.weight.shape
        long, short = (a.T, s.T) if i >= o else (s.T, a.T)
        step = max(1, SMALL.get(a.device.type, SMALL["cuda"]) // short.numel())
        for start in range(0, q, step):
            part = self.weight[start : start + step]
            partial = buffer(a, len(part), *short.shape)  # (q, min(o, i), n)
            if i >= o:
                torch.mm(part.reshape(-1, i), long, out=partial.view(-1, len(a)))
            else:
                torch.matmul(part.mT, long, out=partial)
            total[start : start + step] += partial.mul_(short).sum(1, dtype=total.dtype)

    def _add_summed(self, total: Tensor, a: Tensor, s: Tensor) -> None:
        """Σ_t s_t a_tᵀ once per example, a few outputs at a time, then one product with all W."""
        (o, i), n = self.weight.shape[1:], len(a)
        step = max(1, LARGE.get(a.device.type, LARGE["cuda"]) // (n * i))
        for start in range(0, o, step):
            rows = slice(start, min(start + step, o))
            gradient = buffer(a, n, rows.stop - start, i)
            torch.bmm(s[:, :, rows].mT, a, out=gradient)
            total += _inner(self.weight[:, rows], gradient, total.dtype)

    def by_position(self, a: Tensor, s: Outputs) -> Tensor:
        """⟨W_q, s_t a_tᵀ⟩ at each position: (q, n, t); over t they add up to the inner product."""
        a, s = self._rotated(a, s)
        if isinstance(s, Rows):
            return torch.stack([(s.lookup(table) * a).sum(2) for table in self.weight])
        value = torch.stack([(s * (a @ w.mT)).sum(2) for w in self.weight])
        if self.column is not None:
            value = value + torch.einsum("nto,qo->qnt", s, self.column)
        return value

    def paired(self, a: Tensor, s: Outputs, rows: slice) -> Tensor:
        """⟨W_n, G_n⟩, these rows of W each with one example: (n,)."""
        a, s = self._rotated(a, s)
        if isinstance(s, Rows):
            tables = zip(self.weight[rows], range(len(a)), strict=True)
            sums = [(s[k : k + 1].lookup(table) * a[k]).sum() for table, k in tables]
            return torch.stack(sums)
        value = (s * (a @ self.weight[rows].mT)).sum((1, 2))
        if self.column is not None:
            value = value + (self.column[rows] * s.sum(1)).sum(1)
        return value


@dataclass(frozen=True)
class FactoredReadout:
    """q functionals Σ_r s_qr [a_qr, c_qr]ᵀ: inner products without any (o, i) of a query.

    A gradient at one position has rank 1, and c = 1 with a bias. Other vectors are cut to a rank.
    """

    a: Tensor  # (q r, i)
    s: Tensor  # (q r, o)
    c: Tensor | bool  # (q r,), of the bias coordinate
    rank: int = 1

    @classmethod
    def of(cls, left: Tensor, right: Tensor, bias: bool, dtype: torch.dtype) -> FactoredReadout:
        """Σ_r left_rᵀ right_r, from (q, r, o) and (q, r, width)."""
        s, a = left.to(dtype).flatten(0, 1), right.to(dtype).flatten(0, 1)
        if not bias:
            return cls(a, s, False, left.shape[1])
        return cls(a[:, :-1].contiguous(), s, a[:, -1].contiguous(), left.shape[1])

    def of_rows(self, take: Callable[[Tensor, int], Tensor]) -> FactoredReadout:
        """The part of some outputs."""
        return replace(self, s=take(self.s, 1))

    def of_columns(self, take: Callable[[Tensor, int], Tensor]) -> FactoredReadout:
        """The part of some inputs, without the bias."""
        return replace(self, a=take(self.a, 1), c=False)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> FactoredReadout:
        """With a function of the queries' rows, (q, r, ...), in their place."""

        def rows(values: Tensor) -> Tensor:
            return function(values.view(-1, self.rank, *values.shape[1:])).flatten(0, 1)

        c = rows(self.c) if isinstance(self.c, Tensor) else self.c
        return replace(self, a=rows(self.a), s=rows(self.s), c=c)

    def scaled(self, factor: float) -> FactoredReadout:
        return replace(self, s=self.s * factor)

    def add_inner(self, total: Tensor, a: Tensor, s: Outputs) -> None:
        """total (q, n) += Σ_{r,t} (s_qr · s_nt)(a_qr · a_nt + c_qr)."""
        (n, t, i), o, q = a.shape, s.shape[2], len(total)
        ways = cost.inner_by_position, cost.inner_expanded
        by_position, expanded = (way(n, t, o, i, q, self.rank) for way in ways)
        if self.rank == 1:
            total += self.by_position(a, s).sum(2).to(total.dtype)
        elif isinstance(s, Rows) or by_position < expanded:
            step = max(1, LARGE.get(a.device.type, LARGE["cuda"]) // (n * t * self.rank))
            for start in range(0, q, step):
                contributions = self._queries(start, start + step).by_position(a, s)
                total[start : start + step] += contributions.sum(2, dtype=total.dtype)
        else:
            self._add_expanded(total, a, s)

    def _add_expanded(self, total: Tensor, a: Tensor, s: Tensor) -> None:
        """The queries' and the examples' matrices, a few outputs at a time, then one product."""
        (n, _, i), q, r = a.shape, len(total), self.rank
        left, right = self.s.view(q, r, -1), self.a.view(q, r, i)
        if isinstance(self.c, Tensor):
            column = (left * self.c.view(q, r, 1)).sum(1)
            total += (column @ s.sum(1).mT).to(total.dtype)
        step = max(1, LARGE.get(a.device.type, LARGE["cuda"]) // (max(n, q) * i))
        for start in range(0, s.shape[2], step):
            rows = slice(start, start + step)
            gradient = torch.bmm(s[:, :, rows].mT, a)
            total += _inner(torch.bmm(left[:, :, rows].mT, right), gradient, total.dtype)

    def _queries(self, first: int, end: int) -> FactoredReadout:
        rows = slice(first * self.rank, end * self.rank)
        c = self.c[rows] if isinstance(self.c, Tensor) else self.c
        return FactoredReadout(self.a[rows], self.s[rows], c, self.rank)

    def by_position(self, a: Tensor, s: Outputs) -> Tensor:
        """The same position by position of the examples: (q, n, t)."""
        outputs = s.lookup(self.s.T) if isinstance(s, Rows) else s @ self.s.T
        products = (a @ self.a.T + self.c) * outputs
        if self.rank > 1:
            products = products.view(*products.shape[:2], -1, self.rank).sum(3)
        return products.permute(2, 0, 1)

    def paired(self, a: Tensor, s: Outputs, rows: slice) -> Tensor:
        """The same, these rows each with one example: (n,)."""
        assert isinstance(self.c, bool)  # self-influence takes no rank
        assert isinstance(s, Tensor)  # and lookups have plain readouts
        left = (self.a[rows].unsqueeze(1) * a).sum(2) + self.c
        return (left * (self.s[rows].unsqueeze(1) * s).sum(2)).sum(1)
