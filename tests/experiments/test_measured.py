"""SOURCE with Adam's matrix measured on whitened gradients, against its definition in float64.

Gradients come from `torch.func`, one example at a time; bases, eigenvalues and functions of M are
dense.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support import dense, models
from support import dense_stages as ds
from support.comparing import agree
from torch import Tensor, nn

import whence
from experiments.tasks.measured import Measured, Whitening
from whence.layers.rows import Rows
from whence.operators import Basis, products

EPSILON, FLOOR, STEPS = 1e-3, 0.3, [2, 5, 9, 12]
Blocks = dict[str, Tensor]  # (..., o, width)


# --- a model's parameters as blocks ---------------------------------------------------------------


def of_all_layers(model: nn.Module, values: dict[str, Tensor]) -> Blocks:
    """The blocks of `models.Transformer`; a norm's weight and bias are one column."""
    matrices = {n: x for n, x in dense.matrices(model, values).items() if n != "lm_head"}
    tables = {name: values[f"{name}.weight"] for name in ("wte", "wpe")}
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    pairs = {name: [values[f"{name}.{part}"] for part in ("weight", "bias")] for name in norms}
    return matrices | tables | {n: torch.cat(x, -1).unsqueeze(-1) for n, x in pairs.items()}


def mlp() -> Any:
    data = models.vectors(), models.vectors(3, seed=1)
    return models.mlp(), whence.Classification(), *data, "matrices", dense.matrices


def conv() -> Any:
    data = models.images(), models.images(3, seed=1)
    return models.ConvNet(), whence.Classification(), *data, "matrices", dense.matrices


def gpt() -> Any:
    data = models.documents(), models.documents(3, seed=1)
    return models.Transformer(), whence.LanguageModeling(), *data, "all", of_all_layers


MODELS = {"mlp": mlp, "conv": conv, "gpt": gpt}


ONE_POSITION = ("0", "2", "4", "head")


def grams(G: Tensor) -> tuple[Tensor, Tensor]:
    """Σ G Gᵀ and Σ Gᵀ G."""
    return torch.einsum("noi,npi->op", G, G), torch.einsum("noi,noj->ij", G, G)


class Brute:
    """SOURCE of a small training with Adam, by the definition."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        model, self.task, self.train, self.query, layers, self.blocks = MODELS[name]()
        self.model = model.double()
        optimizer = torch.optim.AdamW(model.parameters(), 0.02, (0.8, 0.9), EPSILON)

        def decreasing(step: int) -> float:
            return 1 / (1 + step / 5)

        given: Any = {"factor": decreasing, "batch_size": 4}
        self.leg = ds.train(model, self.task, self.train, optimizer, STEPS, **given)
        rates = [next(iter(row.values())) for row in self.leg.rates]
        more: Any = {"second_moments": self.leg.moments, "epsilon": EPSILON}
        run = whence.Run.from_checkpoints(
            self.leg.checkpoints, STEPS, rates, optimizer="adamw", **more
        )
        self.study = whence.Study(model, self.task, train=self.train, runs=run, layers=layers)
        self.gradients, self.moments = cache(self._gradients), cache(self._moments)

    def _gradients(self, checkpoint: int, quantity: str) -> Blocks:
        """(n, o, width) of the training losses, or (q, o, width) of the queries' measurements."""
        weights = self.leg.checkpoints[checkpoint]
        parameters, outputs = dense.functional(self.model, weights, self.task)

        def value(parameters: dict[str, Tensor], batch: Any) -> Tensor:
            return getattr(self.task, quantity)(outputs(parameters, batch), batch).sum()

        data = self.train if quantity == "losses" else self.query
        each = [torch.func.grad(value)(parameters, batch) for batch in dense.examples(data)]
        stacked = {name: torch.stack([one[name] for one in each]) for name in parameters}
        blocks: Blocks = self.blocks(self.model, stacked)
        return blocks

    def _moments(self, checkpoint: int) -> dict[str, dense.Moments]:
        weights, fisher = self.leg.checkpoints[checkpoint], dense.empirical(self.task)
        return dense.moments(self.model, weights, self.task, fisher, self.train)

    def root(self, segment: ds.Segment) -> Blocks:
        """D^½."""
        assert segment.moments is not None
        time = next(iter(segment.times.values()))
        inverses = []
        for moments in segment.moments:
            least = {n: FLOOR**2 * v.mean() for n, v in moments.items()}
            roots = {n: v.clamp_min(least[n]).sqrt() for n, v in moments.items()}
            inverses.append(
                self.blocks(self.model, {n: 1 / (x + EPSILON) for n, x in roots.items()})
            )
        return {n: (time * sum(x[n] for x in inverses) / len(inverses)).sqrt() for n in inverses[0]}

    def sides(self, name: str, checkpoints: list[int]) -> tuple[Tensor, Tensor]:
        """Σ G Gᵀ and Σ Gᵀ G; where an example has one position in the layer, Σ s sᵀ and Σ a aᵀ."""
        if name not in ONE_POSITION:
            pairs = [grams(self.gradients(c, "losses")[name]) for c in checkpoints]
            if name == "wte":  # tied: the same weight of each checkpoint's rows
                pairs = [(left / left.trace(), right) for left, right in pairs]
            return sum(left for left, _ in pairs), sum(right for _, right in pairs)  # type: ignore[return-value]
        each = [self.moments(c)[name] for c in checkpoints]
        return sum(m.S for m in each), sum(m.A for m in each)  # type: ignore[return-value]

    def whitened(self, name: str, checkpoints: list[int], root: Tensor, measured: bool) -> Tensor:
        """M of a block, (o width, o width)."""
        G = torch.cat([self.gradients(c, "losses")[name] for c in checkpoints]) * root
        if root.shape[1] == 1:
            return torch.diag(G.square().mean(0).flatten())
        if measured:
            left, right = grams(G)
        else:
            left, right = self.sides(name, checkpoints)
            S, A = left.diagonal(), right.diagonal()
            left, right = left * ((root * A) @ root.mT), right * ((root.mT * S) @ root)
        by_row = name in ("wte", "wpe")
        outputs = torch.eye(len(root)).double() if by_row else torch.linalg.eigh(left)[1]
        Q = torch.kron(outputs.contiguous(), torch.linalg.eigh(right)[1].contiguous())
        return Q @ torch.diag((G.flatten(1) @ Q).square().mean(0)) @ Q.T

    def scores(self, segments: int, measured: bool) -> np.ndarray[Any, Any]:
        """(L, q, n)."""
        points = [self.gradients(c, "measurements") for c in range(len(STEPS))]
        query = {n: (sum(p[n] for p in points) / len(STEPS)).flatten(1) for n in points[0]}
        parts = np.array_split(np.arange(len(STEPS)), segments)
        result = []
        for segment, members in reversed(
            list(zip(self.leg.segments(segments), parts, strict=True))
        ):
            here, root = members.tolist(), self.root(segment)
            losses = [self.gradients(c, "losses") for c in here]
            M = {n: self.whitened(n, here, R, measured) for n, R in root.items()}
            trace = {n: m.trace() for n, m in M.items()}
            total: Any = sum(trace.values())
            score: Any = 0
            for n, m in M.items():
                coupled, R = m * total / trace[n], root[n].flatten()
                g = sum(x[n] for x in losses).flatten(1) / len(losses)  # type: ignore[union-attr]
                v = query[n] * R
                score = score + (v @ dense.F_r(coupled, 1.0) * R) @ g.T
                query[n] = v @ dense.F_S(coupled, 1.0) / R
            result.insert(0, -score / len(self.train))
        return torch.stack(result).numpy()


brute = cache(Brute)


@pytest.mark.parametrize("bases", ["sides", "measured"])
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_definition(name: str, segments: int, bases: str) -> None:
    it = brute(name)
    method = Measured(segments, bases=bases, fisher="empirical", floor=FLOOR)
    exact: Any = {"dtype": torch.float64, "progress": False}
    scores = method.attribute(it.study, it.query, by_segment=True, **exact)
    agree(scores, it.scores(segments, bases == "measured"))


# --- ways to the same sums ------------------------------------------------------------------------


def factors(n: int, t: int, o: int, width: int) -> tuple[Tensor, Tensor, Tensor, Basis]:
    g = torch.Generator().manual_seed(t)
    a, s = (torch.randn(n, t, side, generator=g).double() for side in (width, o))
    root = torch.rand(o, width, generator=g).double() + 0.1
    Q = [torch.linalg.qr(torch.randn(side, side, generator=g).double())[0] for side in (o, width)]
    return a, s, root, Basis(*Q)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("t", "o", "width"), [(1, 4, 6), (2, 12, 3), (9, 3, 4)])
def test_squares_and_grams(t: int, o: int, width: int, rows: bool) -> None:
    """One position by terms of D^½, several built."""
    a, s, root, basis = factors(5, t, o, width)
    basis = Basis(None, basis.inputs) if rows else basis
    G = torch.einsum("nto,nti->noi", s, a) * root
    rotated = G @ basis.inputs if rows else basis.outputs.mT @ G @ basis.inputs  # type: ignore[union-attr]
    total = torch.zeros(o, width).double()
    Whitening(root).add_squares(total, a, s, basis)
    torch.testing.assert_close(total, rotated.square().sum(0))
    S, A = torch.zeros(o, o).double(), torch.zeros(width, width).double()
    Whitening(root).add_grams(S, A, a, s)
    torch.testing.assert_close(products.mirror(S), torch.einsum("noi,npi->op", G, G))
    torch.testing.assert_close(products.mirror(A), torch.einsum("noi,noj->ij", G, G))


def test_looked_up_rows() -> None:
    """Some positions are looked up, the others dense: a tied head."""
    a, s, root, _ = factors(4, 7, 5, 3)
    ids = torch.randint(5, (4, 3), generator=torch.Generator().manual_seed(0))
    s[:, :3] = torch.nn.functional.one_hot(ids, 5)
    G = torch.einsum("nto,nti->noi", s, a) * root
    for rows, exact in (
        (Rows(ids, 5, dense=s[:, 3:]), G),
        (Rows(ids, 5), torch.einsum("nto,nti->noi", s[:, :3], a[:, :3]) * root),
    ):
        inputs, basis = a[:, : rows.shape[1]], Basis(None, factors(1, 1, 5, 3)[3].inputs)
        total, S, A = (torch.zeros(shape).double() for shape in ((5, 3), (5,), (3, 3)))
        Whitening(root).add_squares(total, inputs, rows, basis)
        torch.testing.assert_close(total, (exact @ basis.inputs).square().sum(0))
        Whitening(root).add_grams(S, A, inputs, rows)
        torch.testing.assert_close(S, exact.square().sum((0, 2)))
        torch.testing.assert_close(products.mirror(A), torch.einsum("noi,noj->ij", exact, exact))


def test_refused() -> None:
    for wrong in ({"bases": "guessed"}, {"curvature": "kfac"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Measured(**wrong)  # type: ignore[arg-type]
