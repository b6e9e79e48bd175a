"""Influence functions in other projections than TRAK's dense one.

    SJLT, GraSS    P of one ±1 in each column, at a random row: hashing (Hu et al., 2025). GraSS
                   first drops all but a random share of the parameters.
    LoGra          P_o ⊗ P_i for each layer (Choe et al., 2024): G ↦ P_o G P_iᵀ, from the layer's
                   inputs and output gradients without ever building G

SJLT and GraSS are TRAK with another P. LoGra is

    values[q, m] = -(1/N) φ(q)ᵀ (C + λ)⁻¹ φ(m)          C = (1/N) Σ_m φ(m) φ(m)ᵀ

layer by layer, with the gradients of the losses in C, and λ = 0.1 × the mean eigenvalue of C.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

import whence
from whence.draws import keys, uniforms
from whence.engine.projected_space import ProjectedSpace, Space
from whence.engine.workspace import LOSS, Term, Workspace
from whence.errors import InvalidInput, check_choice, check_count, check_share
from whence.layers.kind import ParameterBlock
from whence.methods.trak import Prepared, cholesky
from whence.operators import KINDS
from whence.operators.fit import accumulator
from whence.persist.identity import key_of, sha256_of
from whence.projections import Gradients, Projection, Random, TwoSided, moments

LOGRA_DAMPING = 0.1  # × the mean eigenvalue


def block_key(block: ParameterBlock) -> int:
    return int.from_bytes(bytes.fromhex(sha256_of(block.name))[:8], "little")


def key_for(workspace: Workspace, seed: int) -> int:
    """Of the run's projection: another run has another P."""
    return int(key_of({"seed": seed, "weights": workspace.run.final.sha256}), 16)


class Sparse(Random):
    """A sparse Johnson-Lindenstrauss transform: E[PᵀP] = I, with one sign in each column.

    Args:
        blocks, dimension, key, device, dtype: as in `Random`.
        share: of the parameters that are used; the others' columns are 0.
    """

    preferred_batch = 1

    def __init__(self, *arguments: Any, share: float = 1.0) -> None:
        super().__init__(*arguments)
        self.share = share

    def __repr__(self) -> str:
        return f"Sparse({super().__repr__()}, {self.share})"

    def project(self, gradients: Mapping[str, Gradients]) -> Tensor:
        n = max(map(len, gradients.values()))
        total = torch.zeros(n, self.dimension, device=self.device, dtype=accumulator(self.dtype))
        for block in self.blocks:
            if block.name in gradients:
                rows, signs = self._entries(block)
                flat = gradients[block.name].rows(0, block.o).flatten(1).to(total.dtype)
                total.index_add_(1, rows, flat * signs.to(total.dtype))
        return total

    def lift(self, values: Tensor, blocks: Collection[str] | None = None) -> dict[str, Tensor]:
        matrices = {}
        for block in self.blocks:
            if blocks is not None and block.name not in blocks:
                continue
            rows, signs = self._entries(block)
            flat = values[:, rows] * signs.to(values.dtype)
            matrices[block.name] = flat.view(-1, *block.shape)
        return matrices

    def _entries(self, block: ParameterBlock) -> tuple[Tensor, Tensor]:
        """For each parameter of a block: its row of P, and its sign; 0 where it is dropped."""
        parameters = torch.arange(block.size, device=self.device)
        hashes = keys(self.key, block_key(block), parameters, device=self.device)
        row, sign, chosen = uniforms(hashes, 3).unbind(-1)
        rows = (row * self.dimension).long()
        signs = torch.where(sign < 0.5, -1.0, 1.0) * (chosen < self.share) / self.share**0.5
        return rows, signs


class SparseTrak(whence.Trak):
    """TRAK with a sparse projection.

    Args:
        dimension, seed, stage, damping: as in `Trak`.
        share: of the parameters that are used: 1 is SJLT, less is GraSS.
    """

    def __init__(
        self,
        dimension: int = 4096,
        seed: int = 0,
        stage: str | None = None,
        damping: float = 0.0,
        share: float = 1.0,
    ) -> None:
        super().__init__(dimension, seed, stage, damping=damping)
        check_share("share", share)
        if not share:
            raise InvalidInput("share=0 leaves no parameters: use more than 0, up to 1")
        self.share = share

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings().items() if name != "joint"}

    def space(self, workspace: Workspace) -> Space:
        blocks, where = workspace.trained_blocks(), (workspace.device, workspace.dtype)
        key = key_for(workspace, self.seed)
        part = Sparse(blocks, self.dimension, key, *where, share=self.share)
        return ProjectedSpace(workspace, Projection([part]))


class LoGra(whence.Trak):
    """LoGra: influence functions of each layer in a projection of its inputs and outputs.

    Args:
        dimension: of all layers together; a layer has k × k of it.
        initialisation: "pca": leading eigenvectors of K-FAC's covariances; "random": normal.
        seed, stage: as in `Trak`.
    """

    def __init__(
        self,
        dimension: int = 4096,
        initialisation: str = "pca",
        seed: int = 0,
        stage: str | None = None,
    ) -> None:
        check_count("dimension", dimension)
        check_choice("initialisation", initialisation, ["pca", "random"])
        super().__init__(dimension, seed, stage)
        self.initialisation = initialisation

    def settings(self) -> dict[str, Any]:
        fixed = ("joint", "damping")
        return {name: value for name, value in super().settings().items() if name not in fixed}

    def prepare(self, workspace: Workspace, terms: list[Term]) -> Prepared:
        space = self.space(workspace)
        data = workspace.fit_data(workspace.study.stages, observed=True)
        final, examples = workspace.run.final, sum(len(part.indices) for part in data)
        settings = {
            "what": "moments of projected loss gradients",
            "projection": [repr(part) for part in space.projection.parts],
            "identity": [part.identity for part in data],
            "losses": [part.losses(final) for part in data],
            "weights": final.sha256,
            "dtype": workspace.final_passes.arithmetic,
        }
        cache, limits = workspace.study.store(workspace.run), workspace.memory // 4
        how = (LOSS, space.projection, cache, settings, workspace.batch_size, limits)
        factors = []
        for gram in moments(data, final, *how):  # N C of each layer
            λ = LOGRA_DAMPING * float(gram.diagonal().mean()) / examples
            factors.append(cholesky(gram, λ or 1.0, examples, workspace.dtype))
        return Prepared(space, factors, None)

    def space(self, workspace: Workspace) -> ProjectedSpace:
        blocks = workspace.trained_blocks()
        k = max(1, int((self.dimension / len(blocks)) ** 0.5))
        make = self._random if self.initialisation == "random" else self._leading
        return ProjectedSpace(workspace, Projection(make(workspace, blocks, k)))

    def _random(self, workspace: Workspace, blocks: list[ParameterBlock], k: int) -> list[Random]:
        key, like = key_for(workspace, self.seed), workspace.zero.to(workspace.dtype)
        return [TwoSided.random([b], [(min(k, b.o), min(k, b.width))], key, like) for b in blocks]

    def _leading(self, workspace: Workspace, blocks: list[ParameterBlock], k: int) -> list[Random]:
        how: Any = {"fisher": "empirical", "seed": self.seed}
        covariances = KINDS["kfac"].fit(workspace, [workspace.run.final], **how)
        like, parts = workspace.zero.to(workspace.dtype), list[Random]()
        for block in blocks:
            basis, sides = covariances.factors[block.name].basis, []
            for size, name in zip(block.shape, ("outputs", "inputs"), strict=True):
                vectors = None if basis is None else getattr(basis, name)
                if vectors is None:  # not mixed
                    vectors = torch.eye(size)
                sides.append(vectors[:, -min(k, size) :].mT.to(like).contiguous())
            about = f"pca, seed {self.seed}, weights {workspace.run.final.sha256}"
            parts.append(TwoSided([block], [(sides[0], sides[1])], about))
        return parts
