"""Preference training: losses, gradients and curvature against formulas written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import dense, models
from support.comparing import close

import whence

EXACT: Any = {"dtype": torch.float64, "progress": False}
BETA = 0.3


class Pairs(list[Any]):
    pass


def pairs(count: int, seed: int) -> Pairs:
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> torch.Tensor:
        size = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(1, 5, (size,), generator=generator)

    return Pairs(
        whence.preference(draw(3), draw(4), draw(4), float(torch.randn((), generator=generator)))
        for _ in range(count)
    )


TRAIN, QUERY = pairs(6, 0), pairs(3, 1)


def trained(layers: str = "all") -> tuple[whence.Study, models.History]:
    torch.manual_seed(0)
    model, task = models.Transformer(tied=False), whence.Preference(beta=BETA)
    history = models.train_run(model, task, TRAIN, [3, 6], 0.5, collate=whence.padded)
    study = whence.Study(model, task, TRAIN, history.run, collate=whence.padded, layers=layers)
    return study, history


def margin(model: Any, weights: Any, pair: dict[str, torch.Tensor]) -> torch.Tensor:
    """β(h - h_ref), one token at a time, without padding."""
    h = torch.zeros((), dtype=torch.float64)
    for side, sign in (("chosen", 1.0), ("rejected", -1.0)):
        ids, labels = pair[f"{side}_input_ids"], pair[f"{side}_labels"]
        logits = torch.func.functional_call(model, weights, (ids[None],))[0].log_softmax(-1)
        for k in range(1, len(ids)):
            if labels[k] != -100:
                h = h + sign * logits[k - 1, ids[k]]
    return BETA * (h - pair["reference"])


def test_tracin_is_that_of_the_losses_written_out() -> None:
    study, history = trained()
    model = study.model.double()
    actual = whence.TracIn().attribute(study, QUERY, by_layer=True, batch_size=2, **EXACT)
    expected = np.zeros(actual.shape)
    for weights in history.checkpoints:
        f, g = (
            [
                torch.func.grad(lambda w, p=pair, of=of: of(margin(model, w, p)))(weights)
                for pair in data
            ]
            for of, data in (
                (lambda m: m, QUERY),
                (lambda m: -torch.nn.functional.logsigmoid(m), TRAIN),
            )
        )
        for name in weights:
            if name.rsplit(".", 1)[0] in actual.layers:
                x, y = (torch.stack([each[name].flatten() for each in part]) for part in (f, g))
                expected -= 0.5 * (x @ y.T).numpy()
    close(actual.values, expected, 1e-8)


def test_curvature_is_the_hessian_of_the_loss() -> None:
    """In the output, and in the Gauss-Newton matrix of influence functions."""
    study, history = trained("matrices")
    task, batch = study.tasks["train"], whence.padded(TRAIN)
    with torch.no_grad():
        outputs = task.outputs(study.model.double(), batch)
    p = torch.sigmoid(task.measurements(outputs, batch))
    close(task.output_factor(outputs, batch)[:, 0, 0] ** 2, BETA**2 * p * (1 - p), 1e-10)
    actual = whence.Influence(0.1, solver="cg", tolerance=1e-10).attribute(study, QUERY, **EXACT)
    weights = history.checkpoints[-1]
    of: Any = study.model, weights, task

    def flat(quantity: str, data: Any) -> torch.Tensor:
        blocks = dense.per_example_gradients(*of, quantity, data, whence.padded)
        return torch.cat([blocks[name].flatten(1) for name in blocks], 1)

    g, f = flat("losses", TRAIN), flat("measurements", QUERY)
    slopes = BETA * (p - 1)  # of the losses, in h
    jacobian = g / slopes[:, None]
    H = (jacobian * (BETA**2 * p * (1 - p))[:, None]).T @ jacobian / len(TRAIN)
    w = torch.linalg.solve(H + 0.1 * torch.eye(len(H), dtype=H.dtype), f.T).T
    close(actual.values, -(w @ g.T).numpy() / len(TRAIN), 1e-6)


def test_bad_input() -> None:
    for beta in (0, -1.0, "large", True):
        with pytest.raises(whence.WhenceError, match="beta"):
            whence.Preference(beta=beta)  # type: ignore[arg-type]
    with pytest.raises(whence.WhenceError, match="measurement='log_prob'"):
        whence.Preference(measurement="log_prob")
    for reference in (float("nan"), None, "0.5"):
        with pytest.raises(whence.WhenceError, match="must be a finite number"):
            whence.preference([1], [2], [3], reference)  # type: ignore[arg-type]
    batch = whence.padded(TRAIN)
    del batch["reference"]
    with pytest.raises(whence.WhenceError, match="no reference in the batch"):
        whence.Preference().outputs(models.Transformer(), batch)
