"""Bad input, through the public names: what was wrong, which value, what to do; nothing lost."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from support import models
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import whence
import whence.run
from whence.engine.workspace import ComputeOptions
from whence.retrain.truth import Truth, draw_subsets
from whence.run.schedule import CheckpointSchedule

EXACT = {"dtype": torch.float64, "progress": False}
TRAIN, QUERY = models.vectors(), models.vectors(3, seed=1)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.mlp().double()


def trained(model: nn.Module | None = None, task: Any = None, train: Any = TRAIN) -> whence.Run:
    task = task or whence.Classification()
    return models.train_run(model or net(), task, train, [4, 8, 12], 0.2).run


RUN = trained()


def study(**changes: Any) -> whence.Study:
    given = {"model": net(), "task": whence.Classification(), "train": TRAIN, "runs": RUN}
    return whence.Study(**(given | changes))


def attribute(method: Any = None, query: Any = QUERY, **changes: Any) -> whence.Scores:
    names = ("dtype", "batch_size", "memory", "out", "top", "by_segment", "workers")
    options = {name: changes.pop(name) for name in names if name in changes}
    return (method or whence.Source.published(2)).attribute(
        study(**changes), query, **(EXACT | options)
    )


# --- datasets -------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(TRAIN)


class CountedStream(Stream):
    def __len__(self) -> int:
        return len(TRAIN)


def test_empty_data() -> None:
    with pytest.raises(ValueError, match=r"train is empty: .*at least one example"):
        study(train=[])
    with pytest.raises(ValueError, match=r"query is empty: .*at least one example"):
        attribute(query=TensorDataset(torch.zeros(0, 4), torch.zeros(0)))


@pytest.mark.parametrize(
    "data",
    [Stream(), CountedStream(), iter(TRAIN), DataLoader(TRAIN), {1, 2}, 3],
    ids=lambda data: type(data).__name__,
)
def test_not_map_style(data: Any) -> None:
    says = rf"is a {type(data).__name__}: .*map-style"
    with pytest.raises(TypeError, match="train " + says):
        attribute(train=data)
    with pytest.raises(TypeError, match="query " + says):
        attribute(query=data)


@pytest.mark.parametrize(
    "query",
    [
        TensorDataset(*QUERY.tensors, QUERY.tensors[1]),
        TensorDataset(QUERY.tensors[0]),
        TensorDataset(QUERY.tensors[1], QUERY.tensors[0]),
        models.Rows(x=QUERY.tensors[0], labels=QUERY.tensors[1]),
    ],
    ids=["more", "fewer", "another order", "names"],
)
def test_query_batches_of_another_structure(query: Any) -> None:
    with pytest.raises(ValueError, match=r"query batches .* training batches .*float.*integer.*:"):
        attribute(query=query)


def test_query_fields_of_another_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    x, y = TRAIN.tensors
    model, train = Named().double(), models.Rows(x=x, labels=y)
    run = whence.Run.from_checkpoints([model.state_dict()], [4], 0.1)
    with pytest.raises(ValueError, match=r"'inputs'.*'x'"):
        attribute(
            whence.TracIn(), models.Rows(inputs=x, labels=y), model=model, train=train, runs=run
        )


def test_stages_are_checked() -> None:
    checkpoints = [net(k).state_dict() for k in (1, 2)]
    stages = {"stages": {"one": 2, "two": 4}, "sizes": {"one": 12, "two": 5}}
    run = whence.Run.from_checkpoints(checkpoints, [2, 4], 0.1, **stages)
    few = models.vectors(5)
    with pytest.raises(ValueError, match=r"give train=\{'one': dataset"):
        study(runs=run)
    with pytest.raises(ValueError, match=r"stages \['one', 'too'\], but the run has"):
        study(runs=run, train={"one": TRAIN, "too": few})
    with pytest.raises(ValueError, match=r"'one' was trained on 12 examples, .* has 5.*swapped"):
        study(runs=run, train={"one": few, "two": TRAIN})
    with pytest.raises(ValueError, match=r"runs differ in their stages: .*one.*train"):
        study(runs=[run, RUN], train={"one": TRAIN, "two": few})
    with pytest.raises(ValueError, match=r"stage='three' is not in the run: it has \['one', 'two'"):
        attribute(
            whence.Source.published(2, stage="three"), runs=run, train={"one": TRAIN, "two": few}
        )


def test_a_subset_of_other_data() -> None:
    run = whence.Run.from_checkpoints([net().state_dict()], [2], 0.1, subset=[0, 3, 12])
    with pytest.raises(ValueError, match=r"used example 12, but the data has 12: give the whole"):
        study(runs=run)


@pytest.mark.parametrize("noise", [1e-6, 1.0])
def test_data_that_differs_at_every_read_is_reported(noise: float) -> None:
    class Augmented(Dataset):
        def __len__(self) -> int:
            return len(TRAIN)

        def __getitem__(self, index: int) -> Any:
            x, y = TRAIN[index]
            return x + noise * torch.randn(4), y

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attribute(train=Augmented())
            said = [str(w.message) for w in caught]
        except ValueError as error:
            said = [str(error)]
    assert any("augment" in text for text in said), said


# --- models, tasks, runs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": net}, TypeError, r"model must be a torch.nn.Module, not function"),
        (
            {"task": whence.Classification},
            TypeError,
            r"task must be a whence.Task .*Classification",
        ),
        ({"task": "classification"}, TypeError, r"task must be a whence.Task .*'classification'"),
        ({"task": {"train": "margin"}}, TypeError, r"task must be a whence.Task .*'margin'"),
        ({"runs": []}, ValueError, r"runs is empty: give at least one"),
        ({"runs": "nowhere/run"}, whence.run.RunError, r"no run at .*nowhere/run: no such folder"),
    ],
)
def test_a_study_of_the_wrong_things(change: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        study(**change)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(whence.run.RunError, match=r"it has no run.json"):
        study(runs=tmp_path)


def test_a_run_before_its_first_checkpoint(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(KeyboardInterrupt),
        whence.Recorder(tmp_path / "run", model, optimizer, checkpoints=1, total_steps=10),
    ):
        model(TRAIN.tensors[0]).sum().backward()
        optimizer.step()
        raise KeyboardInterrupt
    with pytest.raises(whence.run.RunError, match=r"no checkpoint|no run at"):
        attribute(runs=tmp_path / "run")


def test_a_model_without_parameters() -> None:
    with pytest.raises(ValueError, match=r"no (layer|parameters)|not in the model"):
        attribute(model=nn.Flatten())


def test_a_checkpoint_of_another_architecture() -> None:
    for model, says in (
        (
            models.mlp((4, 6, 4, 3)),
            r"0.weight is \(5, 4\) in the checkpoint and \(6, 4\) in the model",
        ),
        (models.mlp((4, 5, 4, 4, 3)), r"missing 6.bias, 6.weight"),
        (models.mlp((4, 5, 3)), r"not in the model: 4.bias, 4.weight"),
    ):
        with pytest.raises(
            ValueError, match=f"step 12 is of another architecture.*{says}"
        ) as error:
            attribute(model=model)
        assert "Give Study the model that was trained" in str(error.value)


def test_only_an_early_checkpoint_is_of_another_architecture() -> None:
    checkpoints = [models.mlp((4, 6, 4, 3)).state_dict(), net().state_dict()]
    run = whence.Run.from_checkpoints(checkpoints, [3, 7], 0.1)
    with pytest.raises(ValueError, match=r"checkpoint at step 3 is of another architecture"):
        attribute(runs=run)


@pytest.mark.parametrize("way", ["altered", "truncated", "missing"])
def test_a_checkpoint_altered_after_the_study_was_made(tmp_path: Path, way: str) -> None:
    run = RUN.save(tmp_path / "run")
    built = study(runs=run)
    file = tmp_path / "run" / "checkpoints" / "step-00000004.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    if way == "missing":
        file.unlink()
    else:
        file.write_bytes(data if way == "altered" else data[:-9])
    with pytest.raises(
        whence.run.RunError, match=r"step-00000004.safetensors (was|is) .*estore it"
    ):
        whence.Source.published(2).attribute(built, QUERY, **EXACT)


def test_what_was_fitted_before_an_alteration_is_not_lost(tmp_path: Path) -> None:
    run = RUN.save(tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "step-00000012.safetensors"
    data = file.read_bytes()
    whole = attribute(whence.Source.published(3), runs=run)
    files = sorted((tmp_path / "run" / "factors").iterdir())
    file.write_bytes(data[:-1])
    with pytest.raises(whence.run.RunError):
        attribute(whence.Source.published(3), runs=run)
    file.write_bytes(data)
    assert sorted((tmp_path / "run" / "factors").iterdir()) == files
    assert np.array_equal(attribute(whence.Source.published(3), runs=run).values, whole.values)


def test_an_adam_run_without_second_moments_is_refused_by_source_alone() -> None:
    run = whence.Run.from_checkpoints([net().state_dict()], [4], 0.1, optimizer="adam")
    with pytest.raises(ValueError, match=r"'adam'.*step 4 has no second moments: .*Recorder"):
        attribute(whence.Source.published(1), runs=run)
    attribute(whence.Influence.published(), runs=run)
    attribute(whence.TracIn(), runs=run)


# --- parameter groups -----------------------------------------------------------------------------

NAMES = [name for name, _ in net().named_parameters()]


def smooth(seed: int = 0) -> nn.Module:
    """Without dead units, so that every layer counts."""
    model = net(seed)
    model[1], model[3] = nn.Tanh(), nn.Tanh()
    return model


def grouped(rates: dict[str, float]) -> whence.Run:
    """Three checkpoints, and a rate for each of the parameters named."""
    checkpoints = [smooth(k).state_dict() for k in (1, 2, 3)]
    table = np.tile([list(rates.values())], (6, 1))
    return whence.Run.from_checkpoints(
        checkpoints, [2, 4, 6], table, groups=[[name] for name in rates]
    )


@pytest.mark.parametrize("name", ["source", "influence", "tracin"])
def test_parts_of_a_fused_layer_at_different_rates_are_refused_by_name(name: str) -> None:
    """A linear layer is cut into weight and bias; attention's packed projection is not."""
    method = {
        "source": whence.Source(1),
        "influence": whence.Influence("source"),
        "tracin": whence.TracIn(),
    }[name]
    model = models.Attentive().double()
    names = [parameter for parameter, _ in model.named_parameters()]
    rates = [0.3 if parameter == "attention.in_proj_bias" else 0.1 for parameter in names]
    groups = [[parameter] for parameter in names]
    run = whence.Run.from_checkpoints([model.state_dict()], [1], [rates], groups=groups)
    with pytest.raises(ValueError, match=r"attention.in_proj_bias 0.3.*Study\(layers="):
        attribute(method, model=model, runs=run)
    with pytest.warns(UserWarning, match="left out"):
        attribute(method, model=model, runs=run, layers="matrices")


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("name", ["source", "influence", "influence source", "tracin"])
def test_a_frozen_layer_counts_for_nothing(name: str, outside: bool) -> None:
    """Rate 0, or in no group: S = I and r = 0, as if it were not tracked."""
    method = {
        "source": whence.Source.published(3),
        "influence": whence.Influence.published(1e-3),
        "influence source": whence.Influence.published("source"),
        "tracin": whence.TracIn(),
    }[name]
    rates = dict.fromkeys(NAMES, 0.1) | {"2.weight": 0.0, "2.bias": 0.0}
    run = grouped({n: r for n, r in rates.items() if r or not outside})
    found = attribute(method, model=smooth(), runs=run).values
    without = attribute(method, model=smooth(), runs=run, layers=["0", "4"]).values
    np.testing.assert_allclose(found, without, rtol=1e-9, atol=1e-12 * abs(without).max())
    trained = attribute(method, model=smooth(), runs=grouped(dict.fromkeys(NAMES, 0.1))).values
    assert abs(trained - without).max() > 1e-3 * abs(without).max()


def test_everything_frozen_is_reported() -> None:
    run = grouped(dict.fromkeys(NAMES, 0.0))
    with pytest.warns(
        UserWarning, match=r"updates 0..2 are inert: every tracked layer's rate is 0"
    ):
        found = attribute(whence.Source.published(3), runs=run)
    assert not found.values.any()


# --- numbers that are none ------------------------------------------------------------------------


def spoiled(example: int, value: float) -> TensorDataset:
    x, y = (t.clone() for t in TRAIN.tensors)
    x[example, 1] = value
    return TensorDataset(x, y)


@pytest.mark.parametrize(
    "method", [whence.Source.published(3), whence.Influence.published(), whence.TracIn()], ids=repr
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_training_example_that_is_not_finite_is_named(method: Any, value: float) -> None:
    step = 12 if isinstance(method, whence.Influence) else 4
    with pytest.raises(FloatingPointError, match=r"input of layer 0 .* train example 7\.") as error:
        attribute(method, train=spoiled(7, value), batch_size=5)
    assert f"checkpoint at step {step}" in str(error.value)
    assert "leave out the example" in str(error.value)


@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
@pytest.mark.parametrize("kind", ["ekfac", "diagonal"])
def test_an_infinite_input_whose_output_is_finite_is_named(fisher: str, kind: str) -> None:
    """tanh(∞) = 1: neither the loss nor a gradient at any output shows it."""
    model = smooth()
    run = whence.Run.from_checkpoints([model.state_dict()], [4], 0.1)
    data = spoiled(7, float("inf"))
    assert model(data.tensors[0]).isfinite().all()
    with pytest.raises(FloatingPointError, match=r"input of layer 0 .* train example 7\."):
        attribute(whence.Source.published(1, kind, fisher), model=model, train=data, runs=run)


def test_a_query_that_is_not_finite_is_named() -> None:
    x, y = (t.clone() for t in QUERY.tensors)
    x[2] = float("nan")
    with pytest.raises(FloatingPointError, match=r"step 12: .* layer 0 .* query example 2\."):
        attribute(query=TensorDataset(x, y))


def test_a_target_that_is_not_finite_is_named() -> None:
    model, task = models.mlp((4, 3, 1)), whence.Regression()
    train = models.regression()
    run = trained(model, task, train)
    y = train.tensors[1].clone()
    y[9] = float("nan")
    train = TensorDataset(train.tensors[0], y)
    query = models.regression(3, seed=1)
    with pytest.raises(FloatingPointError, match=r"gradient at layer 2 .* train example 9\."):
        attribute(whence.TracIn(), query, model=model, task=task, train=train, runs=run)


def test_a_loss_that_overflows_is_named() -> None:
    """Its gradient is still a number."""
    model, task = models.mlp((4, 3, 1)), whence.Regression()
    train = models.regression()
    run = trained(model, task, train)
    y = train.tensors[1].clone()
    y[9] = 1e30
    train = TensorDataset(train.tensors[0], y)
    query = models.regression(3, seed=1)
    changes = {"model": model, "task": task, "train": train, "runs": run}
    with pytest.raises(FloatingPointError, match=r"step 4: .*loss .* train example 9\b"):
        attribute(whence.TracIn(), query, dtype=torch.float32, batch_size=5, **changes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", [whence.Source.published(3), whence.TracIn()], ids=repr)
def test_weights_that_are_not_finite(value: float, method: Any) -> None:
    checkpoints = [copy.deepcopy(c.weights()) for c in RUN.checkpoints]
    checkpoints[1]["2.weight"][0, 0] = value
    run = whence.Run.from_checkpoints(checkpoints, [4, 8, 12], 0.1)
    with pytest.raises(FloatingPointError, match=r"checkpoint at step 8: .* layer ") as error:
        attribute(method, runs=run)
    assert "checkpoint itself has diverged" in str(error.value)


def test_scores_too_large_for_their_type_say_so() -> None:
    """No damping and a loss that is flat: the inverse curvature is infinite."""
    train = models.vectors()
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    with torch.no_grad():
        model[0].bias -= 100.0  # dead
    run = whence.Run.from_checkpoints([model.state_dict()], [4], 0.1)
    with pytest.raises((ValueError, FloatingPointError), match=r"damping"):
        attribute(whence.Influence.published(0.0), model=model, train=train, runs=run)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: whence.Classification("accuracy"),
            r"measurement='accuracy' .*'margin', 'loss', 'l",
        ),
        (lambda: whence.Regression("mae"), r"loss='mae' .*'mse', 'half_mse'"),
        (lambda: whence.Regression(measurement="r2"), r"measurement='r2' .*'absolute_error'"),
        (lambda: whence.LanguageModeling("max"), r"reduction='max' .*'mean', 'sum'"),
        (lambda: whence.LanguageModeling(measurement="bits"), r"measurement='bits' .*'log_prob'"),
        (
            lambda: attribute(whence.Source.published(curvature="hessian")),
            r"curvature='hessian' .*'ekfac'",
        ),
        (
            lambda: attribute(whence.Influence.published(curvature="gn")),
            r"curvature='gn' .*'ekfac'.*'kfac'",
        ),
        (
            lambda: attribute(whence.Source.published(fisher="true")),
            r"fisher='true' .*'sampled', 'exact'",
        ),
        (lambda: attribute(whence.Influence.published(fisher="mc")), r"fisher='mc' .*'empirical'"),
        (
            lambda: attribute(whence.Source.published(segments="auto?")),
            r"segments='auto\?'.*'auto' or 'stages'",
        ),
        (lambda: attribute(whence.Source.published(segments=0)), r"segments=0.* at least 1"),
        (
            lambda: attribute(whence.Source.published(segments=4)),
            r"segments=4, .*only 3 .*segments<=3",
        ),
        (
            lambda: attribute(whence.Source.published(segments=[4, 9])),
            r"\[9\].* no checkpoint.*\[4, 8, 12\]",
        ),
        (lambda: whence.Source.published(damping=-1.0), r"damping=-1.0 "),
        (lambda: whence.Source.published(damping=float("nan")), r"damping=nan "),
        (lambda: whence.Source.published(damping="source"), r"damping='source' "),
        (lambda: whence.Influence.published(damping=-1), r"damping=-1 .*'source'"),
        (lambda: whence.Influence.published(damping="auto"), r"damping='auto' .*'source'"),
        (
            lambda: whence.Source.published(weight_decay="l2"),
            r"weight_decay='l2'.*'ignore', 'curvature'",
        ),
        (lambda: attribute(whence.Source.published(stage="fine")), r"stage='fine' .* \['train'\]"),
        (lambda: attribute(whence.TracIn(stage="fine")), r"stage='fine' .* \['train'\]"),
        (
            lambda: attribute(whence.Influence.published(stage="fine")),
            r"stage='fine' .* \['train'\]",
        ),
        (lambda: attribute(memory="plenty"), r"memory='plenty' .*'8GB'"),
        (lambda: attribute(memory="8"), r"memory='8' .*'8GB'"),
        (lambda: attribute(memory=8), r"memory=8 bytes .*mebibyte.*'8GB'"),
        (lambda: attribute(memory="-2GB"), r"memory=.*'8GB'"),
        (lambda: attribute(batch_size=0), r"batch_size=0 .*at least 1"),
        (lambda: attribute(top=0), r"top=0 must be .*at least 1"),
        (lambda: attribute(top=2, by_segment=True), r"top=2 together with by_segment"),
        (lambda: attribute(top=2, runs=[RUN, RUN]), r"top=2 with 2 runs: .*Leave top out"),
    ],
)
def test_settings_nobody_knows(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "method", [whence.Source.published(segments=7), whence.Source.published(stage="fine")], ids=repr
)
def test_a_refused_call_does_not_occupy_its_folder(method: Any, tmp_path: Path) -> None:
    """Mend the setting and call again: `out` is not taken for the work of another calculation."""
    with pytest.raises(ValueError, match=r"7|fine"):
        attribute(method, out=tmp_path / "scores")
    found = attribute(whence.Source.published(2), out=tmp_path / "scores")
    assert np.array_equal(found.values, attribute(whence.Source.published(2)).values)


# --- tasks that users write -----------------------------------------------------------------------


class Shaped(whence.Classification):
    """What `losses` or `measurements` returns, changed."""

    def __init__(self, which: str, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._which, self._change = which, change

    def losses(self, outputs: Tensor, batch: Any) -> Any:
        found = super().losses(outputs, batch)
        return self._change(found) if self._which == "losses" else found

    def measurements(self, outputs: Tensor, batch: Any) -> Any:
        found = super().measurements(outputs, batch)
        return self._change(found) if self._which == "measurements" else found


@pytest.mark.parametrize(
    "change",
    [Tensor.mean, lambda t: t.unsqueeze(1), lambda t: t.repeat(2), lambda t: t.expand(3, -1)],
    ids=["mean", "(n, 1)", "(2n,)", "(3, n)"],
)
@pytest.mark.parametrize("which", ["losses", "measurements"])
def test_not_one_number_per_example(
    which: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noticed before the long work, not after it."""
    from whence.operators import Fitter

    fitted: list[Any] = []
    monkeypatch.setattr(Fitter, "fit", lambda self, *c: fitted.append(c) or 1 / 0)
    with pytest.raises(ValueError, match=r"Shaped.*one number per example"):
        attribute(task=Shaped(which, change))
    assert not fitted


def test_a_task_that_says_nothing() -> None:
    class Empty(whence.Task):
        pass

    with pytest.raises(TypeError, match=r"Empty must define losses\(outputs, batch\)"):
        attribute(task=Empty())


def test_a_task_without_measurements() -> None:
    class Half(whence.Task):
        def losses(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs.square().sum(1)

    with pytest.raises(TypeError, match=r"Half must define measurements\(outputs, batch\)"):
        attribute(task=Half())


class Poisson(whence.Task):
    """Counts: a loss of its own, convex in the outputs, without pseudo_losses."""

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0])

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs.exp() - self.targets(batch)[:, None] * outputs).flatten(1).sum(1)

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.losses(outputs, batch)


class Flat(Poisson):
    """The same with outputs (n,)."""

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).sum(1)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.exp() - self.targets(batch) * outputs


@pytest.mark.parametrize("task", [Poisson(), Flat()], ids=["(n, c)", "(n,)"])
def test_a_task_without_pseudo_losses(task: Any) -> None:
    """The Hessian of the losses is taken, and drawn from: close to the exact Fisher."""
    train, query = models.vectors(400), models.vectors(5, seed=1)
    model = net()
    run = whence.Run.from_checkpoints([model.state_dict()], [50], 0.1)
    changes = {"task": task, "train": train, "model": model, "runs": run}
    exact = attribute(whence.Source.published(1, fisher="exact"), query, **changes).values
    draws = [
        attribute(whence.Source.published(1, fisher="sampled", seed=seed), query, **changes).values
        for seed in (0, 1)
    ]
    assert not np.array_equal(*draws)
    for drawn in draws:
        error = np.linalg.norm(drawn - exact) / np.linalg.norm(exact)
        assert error < 0.3, error
        assert spearmanr(drawn.ravel(), exact.ravel()).statistic > 0.95
    other = attribute(whence.Source.published(1, fisher="empirical"), query, **changes).values
    assert np.linalg.norm(other - exact) > np.linalg.norm(draws[0] - exact)


def test_regression_on_outputs_without_an_axis() -> None:
    """A model that squeezes its single output away."""
    train, query = models.regression(), models.regression(3, seed=1)
    plain = models.mlp((4, 3, 1)).double()
    flat = nn.Sequential(*plain, nn.Flatten(0))
    for fisher in ("exact", "sampled"):
        found = []
        for model in (plain, flat):
            run = whence.Run.from_checkpoints([model.state_dict()], [50], 0.1)
            changes = {"task": whence.Regression(), "train": train, "model": model, "runs": run}
            found.append(
                attribute(whence.Source.published(1, fisher=fisher), query, **changes).values
            )
        np.testing.assert_allclose(*found, rtol=1e-9)


def test_a_hessian_that_is_too_large_is_refused() -> None:
    class Wide(whence.Task):
        def losses(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs.square().sum(1)

        measurements = losses

    model = nn.Linear(4, 5000)
    run = whence.Run.from_checkpoints([model.state_dict()], [5], 0.1)
    with pytest.raises(ValueError, match=r"in 5000 outputs .*too large.*define pseudo_losses"):
        attribute(whence.Source.published(1), task=Wide(), model=model, runs=run)


def test_no_labels() -> None:
    unlabelled = models.Rows(input=TRAIN.tensors[0], answer=TRAIN.tensors[1])

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, input: Tensor, answer: Tensor) -> Tensor:
            return self.fc(input)

    model = Named().double()
    run = whence.Run.from_checkpoints([model.state_dict()], [5], 0.1)
    with pytest.raises(KeyError, match=r"no labels .*'answer', 'input'.*override targets"):
        attribute(whence.TracIn(), unlabelled, model=model, train=unlabelled, runs=run)


# --- folders --------------------------------------------------------------------------------------


def test_a_folder_of_another_calculation(tmp_path: Path) -> None:
    first = attribute(whence.Source.published(2), out=tmp_path / "out")
    with pytest.raises(ValueError, match=r"out holds .* another calculation .*choose another out"):
        attribute(whence.Source.published(3), out=tmp_path / "out")
    with pytest.raises(ValueError, match=r"another calculation \(different: .*queries"):
        attribute(whence.Source.published(2), models.vectors(4, seed=2), out=tmp_path / "out")
    again = attribute(whence.Source.published(2), out=tmp_path / "out")
    assert np.array_equal(again.values, first.values)


def test_a_folder_of_scores_kept_from_several_runs(tmp_path: Path) -> None:
    first = attribute(whence.Source.published(2), runs=[RUN, trained(net(1))], out=tmp_path / "out")
    again = attribute(whence.Source.published(2), runs=[RUN, trained(net(1))], out=tmp_path / "out")
    assert np.array_equal(again.values, first.values)
    assert np.array_equal(whence.Scores.load(tmp_path / "out").values, first.values)
    with pytest.raises(ValueError, match=r"another calculation"):
        attribute(whence.Source.published(2), out=tmp_path / "out")


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"out is a file"):
        attribute(out=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("damage", ["truncated", "empty", "altered"])
def test_a_damaged_factor_file_is_named_or_fitted_again(tmp_path: Path, damage: str) -> None:
    run = RUN.save(tmp_path / "run")
    whole = attribute(whence.Source.published(3), runs=run).values
    files = sorted((tmp_path / "run" / "factors").iterdir())
    for file in files:
        data = bytearray(file.read_bytes())
        data[-2] ^= 64  # the exponent of the last number
        file.write_bytes({"truncated": data[:-9], "empty": b"", "altered": data}[damage])
    try:
        found = attribute(whence.Source.published(3), runs=run).values
    except OSError as error:
        assert str(tmp_path / "run" / "factors") in str(error) and "delete it" in str(error)
        for file in files:
            file.unlink()
        found = attribute(whence.Source.published(3), runs=run).values
    assert np.array_equal(found, whole)


def test_unreadable_progress(tmp_path: Path) -> None:
    attribute(out=tmp_path / "out")
    meta = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert meta["calculation"]["queries"] == 3
    (tmp_path / "out" / "scores.json").write_text("{")
    with pytest.raises(ValueError, match=r"scores.json is damaged"):
        attribute(out=tmp_path / "out")


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2.5},
        {"batch_size": "a"},
        {"workers": -1},
        {"workers": 0.5},
        {"dtype": "float32"},
        {"dtype": torch.int64},
        {"dtype": None},
        {"device": "warp"},
        {"device": 1.5},
        {"device": "cuda"},
    ],
    ids=str,
)
def test_compute_options_that_make_no_sense(options: dict[str, Any]) -> None:
    if options == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (name,) = options
    with pytest.raises(whence.WhenceError, match=f"^{name}="):
        ComputeOptions(**options)


NO_NUMBERS = [2.5, "8", None, True, float("nan")]


@pytest.mark.parametrize("value", [*NO_NUMBERS, [1.5], [[1]]], ids=str)
def test_segments_that_are_no_numbers(value: Any) -> None:
    with pytest.raises(whence.WhenceError, match=r"^segments="):
        attribute(whence.Source(segments=value))


def test_numbers_of_numpy_are_numbers() -> None:
    plain, numpy = (whence.Source.published(kind(1), seed=kind(3)) for kind in (int, np.int64))
    assert repr(plain) == repr(numpy)


@pytest.mark.parametrize("value", [v for v in NO_NUMBERS if v is not None], ids=str)
def test_settings_that_are_no_numbers(value: Any, tmp_path: Path) -> None:
    for name, make in (
        ("seed", lambda: whence.Source(seed=value)),
        ("top", lambda: attribute(top=value)),
        ("dimension", lambda: whence.Trak(value)),
        ("checkpoints", lambda: CheckpointSchedule.of(value, 10)),
        ("total_steps", lambda: CheckpointSchedule.of(2, value)),
        ("seeds", lambda: Truth(np.ones((1, 1), bool), [[[1.0]]], seeds=[value])),
        ("subsets", lambda: draw_subsets(10, 0.5, value)),
    ):
        with pytest.raises(whence.WhenceError, match=f"^{name}="):
            make()


@pytest.mark.parametrize("value", ["x", None, float("nan"), float("inf"), True], ids=str)
def test_settings_that_are_not_finite(value: Any) -> None:
    states = [net().state_dict()] * 2
    for name, make in (
        ("damping", lambda: whence.Source(damping=value)),
        (
            "weight_decay",
            lambda: whence.Run.from_checkpoints(states, [0, 1], 0.1, weight_decay=value),
        ),
        ("memory", lambda: attribute(memory="1e400GB" if value == float("inf") else value or "x")),
    ):
        with pytest.raises(whence.WhenceError, match=f"^{name}="):
            make()


def test_a_text_is_no_truth_value(tmp_path: Path) -> None:
    for name, make in (
        ("coupling", lambda: whence.Source(coupling="no")),  # type: ignore[arg-type]
        ("joint", lambda: whence.GradientStore.build(study(), tmp_path, 4, joint="no")),  # type: ignore[arg-type]
    ):
        with pytest.raises(whence.WhenceError, match=f"^{name}='no' must be True or False"):
            make()
