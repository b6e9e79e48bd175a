"""SOURCE for Adam-type optimizers: EK-FAC's two steps, taken on whitened gradients.

    G̃_n = D^½ ∘ G_n             S̃ = Σ_n G̃_n G̃_nᵀ          Ã = Σ_n G̃_nᵀ G̃_n
    M = Q̃ Λ̃ Q̃ᵀ                 Λ̃ = mean_c (1/N) Σ_n (Q̃_Sᵀ G̃_n Q̃_A)²

Q̃_S and Q̃_A are the eigenbases of S̃ and Ã. With `bases="sides"` these come from the covariances
that EK-FAC has anyway, S and A, by the formulas of `whence.operators.closed_form`; then fitting M
takes the passes of EK-FAC and no others.

G_n is built and multiplied by D^½. Where an example has one position in a layer, nothing is built:
with D^½ ≈ Σ_k u_k w_kᵀ, G̃_n = Σ_k (u_k ∘ s)(w_k ∘ a)ᵀ is the gradient of a layer with k positions.
A looked-up row is multiplied by its row of D^½.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

import whence
from whence.engine.dynamics import Rates
from whence.engine.workspace import Term, Workspace
from whence.layers.capture import LayerFactors, Outputs
from whence.layers.kind import ParameterBlock
from whence.layers.passes import Weights
from whence.layers.rows import Rows
from whence.operators import EKFAC, KINDS, Basis, Fitter, coupling, products
from whence.operators.closed_form import terms
from whence.operators.operator import named
from whence.operators.statistics import LayerStatistic, Tensors
from whence.persist.identity import tensors_sha256


class Measured(whence.Source):
    """`Source` with M in closed form for Adam, AdamW and RMSprop.

    Args:
        bases: of M: from the "sides" of the curvature, or "measured" too, with one more pass.
        settings: as in `Source`.
    """

    def __init__(self, *arguments: Any, bases: str = "sides", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if bases not in ("sides", "measured"):
            raise ValueError(f"bases={bases!r}: use 'sides' or 'measured'")
        if self.curvature not in ("auto", "ekfac", "shampoo"):
            raise ValueError(f"curvature={self.curvature!r} measures no eigenvalues in eigenbases")
        self.bases = bases

    def operator(
        self, workspace: Workspace, term: Term, rates: Rates, resident: int
    ) -> tuple[Any, Any, dict[str, float]]:
        if rates.applied.scalar:  # SGD
            return super().operator(workspace, term, rates, resident)
        root = rates.applied.sqrt()
        fitter = workspace.fitter([term.stage], self.fisher, self.seed, resident)
        if fitter.world.size > 1:
            raise ValueError("this form runs on one process")
        factors = self._factors(fitter, term.checkpoints, rates.applied)
        M = EKFAC(fitter._placed(EKFAC, factors), names=list(root))
        c = coupling(M) if self.coupling else {}
        return M.scaled(c) + rates.shift, root, c

    def _factors(
        self, fitter: Fitter, checkpoints: Sequence[Weights], applied: Mapping[str, Any]
    ) -> Tensors:
        """Q̃ and Λ̃ of every block."""
        whitening = {}
        for b in fitter.blocks:  # 0 in those that are not trained
            D = torch.as_tensor(applied.get(b.name, 0.0)).to(fitter._zero)
            whitening[b.name] = Whitening(D.expand(b.shape).sqrt())
        roots = {name: each.root for name, each in whitening.items()}
        settings = {
            **fitter.settings,
            "what": "whitened",
            "checkpoints": [fitter._identity(c) for c in checkpoints],
            "root": tensors_sha256(roots),
            "curvature": self.curvature,
            "bases": self.bases,
        }

        def mean(kind: type[Whitened], bases: Mapping[str, Basis | None]) -> Tensors:
            totals: Tensors = {}
            for checkpoint in checkpoints:
                about = {**settings, "step": kind.work, "weights": fitter._identity(checkpoint)}

                def statistic(blocks: Sequence[ParameterBlock]) -> Whitened:
                    sums = fitter.signal, fitter.examples, fitter._zero, None
                    return kind(blocks, *sums, whitening, bases)

                for name, value in fitter._measured(statistic, checkpoint, about, True).items():
                    share = value / len(checkpoints)
                    totals[name] = totals[name] + share if name in totals else share
            return totals

        if self.bases == "measured":
            sides = mean(WhitenedGrams, {})
        else:
            sides = self._sides(fitter, checkpoints, whitening)
        with fitter.passes.clock("eigendecomposition"):
            bases = {
                b.name: _basis(b, sides.pop(f"{b.name}/S"), sides.pop(f"{b.name}/A"), fitter)
                for b in fitter.blocks
            }
        return mean(WhitenedMoments, bases) | named(bases)

    def _sides(
        self,
        fitter: Fitter,
        checkpoints: Sequence[Weights],
        whitening: Mapping[str, Whitening],
    ) -> Tensors:
        """S̃ and Ã of every block, from the covariances."""
        kind = KINDS[self.curvature]
        whole = kind.whole_blocks({b.name: fitter.positions[b.name] for b in fitter.blocks})
        sides: Tensors = {}
        for checkpoint in checkpoints:
            for name, value in fitter.covariances(checkpoint, whole).items():
                share = value.to(fitter.device).double() / len(checkpoints)
                sides[name] = sides[name] + share if name in sides else share
        for name, each in whitening.items():
            S, A, R = sides[f"{name}/S"], sides[f"{name}/A"], each.root.double()
            diagonal = S if S.dim() == 1 else S.diagonal()
            sides[f"{name}/A"] = A * ((R.mT * diagonal) @ R)
            if S.dim() > 1:
                sides[f"{name}/S"] = S * ((R * A.diagonal()) @ R.mT)
        return sides


def _basis(block: ParameterBlock, S: Tensor, A: Tensor, fitter: Fitter) -> Basis | None:
    """Eigenvectors of both sides, computed in float64."""
    if block.diagonal:
        return None
    S, A = (side.to(fitter.device).double() for side in (S, A))
    outputs = None if block.rows else torch.linalg.eigh(S)[1].contiguous()
    basis = Basis(outputs, torch.linalg.eigh(A)[1].contiguous())
    return basis.to(fitter.device, fitter.accumulator)


@dataclass(frozen=True)
class Whitening:
    """Sums over G̃_n = D^½ ∘ G_n of a block, inputs with their bias coordinate.

    Attributes:
        root: D^½, (o, width).
    """

    root: Tensor

    @cached_property
    def terms(self) -> tuple[Tensor, Tensor]:
        """u (k, o) and w (k, width) with D^½ ≈ Σ_k u_k w_kᵀ."""
        return terms(self.root)

    def gradients(self, a: Tensor, s: Outputs) -> Tensor:
        """G̃_n (n, o, width)."""
        return products.build(a, s, None, False) * self.root.to(a.dtype)

    def looked_up(self, a: Tensor, s: Rows) -> Tensor:
        """Inputs that make G̃_n with the same `s`, which only looks up."""
        return a * self.root.to(a.dtype)[s.ids]

    def at_terms(self, a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs w_k ∘ a and output gradients u_k ∘ s of one position, (n, k, ...)."""
        u, w = self.terms
        return a * w.to(a.dtype), s * u.to(s.dtype)

    def add_squares(self, total: Tensor, a: Tensor, s: Outputs, basis: Basis | None) -> None:
        """total (o, width) += Σ_n (Q_Sᵀ G̃_n Q_A)²."""
        if isinstance(s, Rows) and s.dense is None:
            products.add_squares(total, self.looked_up(a, s), s, basis, False)
            return
        if isinstance(s, Tensor) and a.shape[1] == 1 and basis is not None:
            # Σ_{k,j} (s_k ∘ s_j)(a_k ∘ a_j)ᵀ, which builds no G̃
            inputs, outputs = self.at_terms(a, s)
            x = basis.rotate_outputs(outputs).to(total.dtype).unbind(1)
            y = basis.rotate_inputs(inputs).to(total.dtype).unbind(1)
            for k, j in combinations_with_replacement(range(len(x)), 2):
                total.addmm_((x[k] * x[j]).mT, y[k] * y[j], alpha=1 if k == j else 2)
            return
        for rows in _chunks(len(a), total.numel(), a):
            gradients = self.gradients(a[rows], s[rows])
            if basis is not None:
                gradients = gradients @ basis.inputs
                if basis.outputs is not None:
                    gradients = basis.outputs.mT @ gradients
            total += gradients.square_().sum(0, dtype=total.dtype)

    def add_grams(self, S: Tensor, A: Tensor, a: Tensor, s: Outputs) -> None:
        """S (o, o) += Σ_n G̃_n G̃_nᵀ and A (width, width) += Σ_n G̃_nᵀ G̃_n; upper triangles.

        An S (o,) gets the diagonal only.
        """
        if isinstance(s, Rows) and s.dense is None:
            products.add_whole_grams(S, A, self.looked_up(a, s), s, False)
            return
        if isinstance(s, Tensor) and a.shape[1] == 1 and S.dim() > 1:
            inputs, outputs = self.at_terms(a, s)
            products.add_gram(S, (_root(inputs @ inputs.mT) @ outputs).flatten(0, 1))
            products.add_gram(A, (_root(outputs @ outputs.mT) @ inputs).flatten(0, 1))
            return
        for rows in _chunks(len(a), self.root.numel(), a):
            gradients = self.gradients(a[rows], s[rows])
            products.add_gram(A, gradients.flatten(0, 1))
            if S.dim() == 1:
                S += gradients.square().sum((0, 2), dtype=S.dtype)
            else:
                products.add_gram(S, gradients.mT.reshape(-1, len(S)))


def _root(C: Tensor) -> Tensor:
    """R (n, k, k) with RᵀR = C."""
    values, vectors = torch.linalg.eigh(C.double())
    root: Tensor = vectors * values.clamp_min(0.0).sqrt().unsqueeze(1)
    return root.mT.to(C)


def _chunks(n: int, numbers: int, like: Tensor) -> list[slice]:
    """Examples in parts, each with a matrix of that many numbers."""
    step = max(1, products.SMALL.get(like.device.type, products.SMALL["cuda"]) // numbers)
    return [slice(start, start + step) for start in range(0, n, step)]


def _inputs(factors: LayerFactors) -> Tensor:
    """(n, t, width): with the bias coordinate. Where there is no position, s is 0."""
    a = factors.a
    return torch.cat([a, a.new_ones(*a.shape[:2], 1)], 2) if factors.block.bias else a


@dataclass(frozen=True)
class Whitened(LayerStatistic):
    """A sum over whitened gradients."""

    whitening: Mapping[str, Whitening]
    bases: Mapping[str, Basis | None]


@dataclass(frozen=True)
class WhitenedGrams(Whitened):
    """ "<block>/S" = Σ_n G̃_n G̃_nᵀ / N, of rows its diagonal, and "<block>/A" = Σ_n G̃_nᵀ G̃_n / N."""

    work = "covariances"

    def shapes(self, block: ParameterBlock) -> dict[str, tuple[int, ...]]:
        S = (block.o,) if block.rows else (block.o, block.o)
        return {"A": (block.width, block.width), "S": S}

    def add_layer(self, totals: Tensors, factors: LayerFactors, first: bool) -> None:
        name = factors.block.name
        S, A = totals[f"{name}/S"], totals[f"{name}/A"]
        self.whitening[name].add_grams(S, A, _inputs(factors), factors.s)

    def finish(self, totals: Tensors) -> Tensors:
        sides = {name: totals.pop(name) / self.examples for name in list(totals)}
        return {n: x if x.dim() == 1 else products.mirror(x) for n, x in sides.items()}


@dataclass(frozen=True)
class WhitenedMoments(Whitened):
    """ "<block>/eigenvalues" = Σ_n (Q̃_Sᵀ G̃_n Q̃_A)² / N."""

    work = "eigenvalues"

    def shapes(self, block: ParameterBlock) -> dict[str, tuple[int, ...]]:
        return {"eigenvalues": block.shape}

    def add_layer(self, totals: Tensors, factors: LayerFactors, first: bool) -> None:
        name, a = factors.block.name, _inputs(factors)
        basis = self.bases[name]
        basis = basis and basis.to(a.device, a.dtype)
        self.whitening[name].add_squares(totals[f"{name}/eigenvalues"], a, factors.s, basis)

    def finish(self, totals: Tensors) -> Tensors:
        return {n: totals.pop(n).clamp_min_(0.0) / self.examples for n in list(totals)}
