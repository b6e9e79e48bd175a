"""Runs that are drawn instead of trained."""

from __future__ import annotations

import numpy as np
import torch
from support.comparing import close
from torch import Tensor, nn

import whence
from experiments.tasks.further import Redrawn, redrawn

FEATURES, EXAMPLES = 4, 60
X = torch.randn(EXAMPLES, FEATURES, generator=torch.Generator().manual_seed(0)).double()
X[:, -1] = 0.0  # no example says anything about this weight
DATA = torch.utils.data.TensorDataset(X, X @ torch.ones(FEATURES, 1).double())


def study(rate: float, updates: int) -> whence.Study:
    """Linear regression by gradient descent on all examples."""
    torch.manual_seed(1)
    net = nn.Linear(FEATURES, 1).double()
    task = whence.Regression()
    initial = {name: p.clone() for name, p in net.state_dict().items()}
    checkpoints = []
    for update in range(1, updates + 1):
        net.zero_grad()
        task.losses(task.outputs(net, DATA.tensors), DATA.tensors).mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter -= rate * parameter.grad
        if update in (updates // 2, updates):
            checkpoints.append({name: p.clone() for name, p in net.state_dict().items()})
    steps = [updates // 2, updates]
    run = whence.Run.from_checkpoints(checkpoints, steps, rate, initial=initial)
    return whence.Study(net, task, DATA, run)


def moves(given: whence.Study) -> list[Tensor]:
    """How far many draws are from the run's weights, at both checkpoints: (draws, features)."""
    (run,) = given.runs
    generator = torch.Generator().manual_seed(2)
    draws = [redrawn(given, run, generator) for _ in range(800)]
    return [
        torch.cat([d.checkpoints[k].weights()["weight"] for d in draws])
        - run.checkpoints[k].weights()["weight"]
        for k in (0, 1)
    ]


def test_without_training_only_the_initial_weights_are_drawn_again() -> None:
    given = study(1e-12, 4)
    first = given.runs[0].initial
    assert first is not None
    tau = float(first.weights()["weight"].std(correction=0))
    for change in moves(given):
        close(change.std(0), torch.full((FEATURES,), tau).double(), 0.1)


def test_what_the_data_decided_survives_as_it_does_in_training() -> None:
    """exp(-η K H) for a linear model, H from its data."""
    rate, updates = 0.05, 20
    given = study(rate, updates)
    halfway, final = moves(given)
    first = given.runs[0].initial
    assert first is not None
    tau = float(first.weights()["weight"].std(correction=0))
    inputs = torch.cat([X, torch.ones(EXAMPLES, 1)], 1)  # with the bias
    H = 2 * inputs.mT @ inputs / EXAMPLES  # of the squared error
    for change, steps in ((halfway, updates // 2), (final, updates)):
        expected = torch.matrix_exp(-2 * rate * steps * H)[:FEATURES, :FEATURES].diagonal().sqrt()
        close(change.std(0)[-1], tau, 0.1)  # nothing was learned about this one
        ratio = change.std(0)[:-1] / (tau * expected[:-1])
        assert bool(((ratio > 0.5) & (ratio < 2)).all()), ratio
    assert bool((final.std(0)[:-1] < halfway.std(0)[:-1]).all())


def test_scores_are_the_mean_over_all_runs() -> None:
    given = study(0.05, 20)
    (run,) = given.runs
    before = run.fingerprint
    queries = torch.utils.data.Subset(DATA, range(3))
    method = whence.Source()
    mean = Redrawn(method, count=3, seed=4).attribute(given, queries, progress=False)
    drawn = [redrawn(given, run, torch.Generator().manual_seed(4 * 3 + k)) for k in (1, 2)]
    values = [
        method.attribute(whence.Study(given.model, given.tasks, given.train, r), queries).values
        for r in (run, *drawn)
    ]
    close(mean.values, np.mean(values, axis=0), 1e-6)
    assert run.fingerprint == before and len({r.fingerprint for r in (run, *drawn)}) == 3
