"""Output gradients of a lookup, never formed: one row of a table at each position.

An embedding's output at position t is row k of its weight (o, i), k = ids[n, t]. In the layout of
all other layers, G = Σ_t s_t a_tᵀ, `s_t` (o) is 1 in row k and 0 elsewhere, and `a_t` (i) is the
gradient of the output. `Rows` stands for this `s` (n, t, o) and takes n t numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """`s` (n, t, o) of a lookup.

    Attributes:
        ids: (n, t₁), in 0..o-1.
        o: number of rows.
        weights: (n, t₁), what each looked-up row is multiplied by; None is 1.
        dense: (n, t₂, o), plain `s` of the positions after these, where the same weight is also
            used as a matrix (a tied head).
    """

    ids: Tensor
    o: int
    weights: Tensor | None = None
    dense: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        (n, t), dense = self.ids.shape, self.dense
        return n, t + (0 if dense is None else dense.shape[1]), self.o

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, examples: slice) -> Rows:
        return self._each(lambda x: x[examples])

    def folded(self, examples: int) -> Rows:
        """The same rows, grouped into this many examples."""
        return self._each(lambda x: x.reshape(examples, -1, *x.shape[2:]))

    def to(self, *args: Any) -> Rows:
        return replace(self, dense=None if self.dense is None else self.dense.to(*args))

    def _each(self, change: Any) -> Rows:
        weights, dense = (None if x is None else change(x) for x in (self.weights, self.dense))
        return Rows(change(self.ids), self.o, weights, dense)

    def split(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of a (n, t, ...) that are looked up, and the dense ones."""
        return a[:, : self.ids.shape[1]], a[:, self.ids.shape[1] :]

    def weighted(self, a: Tensor) -> Tensor:
        """Output gradients (..., n, t₁ or 1, i) times the weights: (..., n, t₁, i)."""
        if self.weights is None:
            return a
        return a * self.weights.unsqueeze(2).to(a.dtype)

    def outer(self, a: Tensor) -> Tensor:
        """Σ_t s_t a_tᵀ: (n, o, i)."""
        n, i = len(a), a.shape[2]
        looked_up, rest = self.split(a)
        total = a.new_zeros(n, self.o, i) if self.dense is None else self.dense.mT @ rest
        first = torch.arange(n, device=a.device).unsqueeze(1) * self.o
        add_rows(total.view(n * self.o, i), (first + self.ids).flatten(), looked_up.flatten(0, 1))
        return total

    def lookup(self, table: Tensor) -> Tensor:
        """Σ_o s_to table[o]: (o, k) -> (n, t, k)."""
        rows = table[self.ids]
        return rows if self.dense is None else torch.cat([rows, self.dense @ table], 1)

    def picked(self, chosen: Tensor) -> Rows:
        """The same over these distinct rows (r,) only, with one more row for all others."""
        place = self.ids.new_full((self.o,), len(chosen))
        place[chosen] = torch.arange(len(chosen), device=place.device)
        dense = self.dense
        if dense is not None:
            dense = torch.cat([dense[..., chosen], dense[..., :1] * 0], 2)
        return Rows(place[self.ids], len(chosen) + 1, self.weights, dense)

    def merged(self, a: Tensor) -> Tensor:
        """Looked-up positions a (n, t₁, i), those of the same row of an example added up in the
        first of them; the others are 0. Squares of the rows are then squares of the sums."""
        n, t, i = a.shape
        if t == 1:
            return a
        first = (self.ids.unsqueeze(2) == self.ids.unsqueeze(1)).to(torch.uint8).argmax(2)
        place = first + torch.arange(n, device=a.device).unsqueeze(1) * t
        total = a.new_zeros(n, t, i)
        add_rows(total.view(n * t, i), place.flatten(), a.flatten(0, 1))
        return total


def add_rows(total: Tensor, ids: Tensor, values: Tensor) -> None:
    """total[ids[k]] += values[k], always in the same order."""
    values = values.to(total.dtype)
    if total.device.type == "cpu":
        total.index_add_(0, ids, values)
    else:  # which sorts, where `index_add_` adds in any order
        total.index_put_((ids,), values, accumulate=True)
