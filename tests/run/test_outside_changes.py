"""Training that the recorder does not see: it is noticed, stored with the run, and shown."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import models
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import whence
from whence.present import views

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, Y)
STEPS = 20


def net() -> nn.Module:
    torch.manual_seed(0)
    return models.mlp((4, 6, 5, 3))


def update(model: nn.Module, *optimizers: torch.optim.Optimizer, k: int = 0) -> None:
    which = torch.arange(8 * (k % 3), 8 * (k % 3) + 8)
    for optimizer in optimizers:
        optimizer.zero_grad()
    F.cross_entropy(model(X[which]), Y[which]).backward()
    for optimizer in optimizers:
        optimizer.step()


@contextmanager
def heard() -> Iterator[list[str]]:
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught if w.category is UserWarning]


def recorded(
    path: Path, between: Callable[[nn.Module, int], Any] = lambda model, k: None, **options: Any
) -> tuple[nn.Module, whence.Run, list[str]]:
    """A training of all layers, with something done after every update."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"checkpoints": 4, "total_steps": STEPS} | options
    with heard() as messages, whence.Recorder(path, model, optimizer, **options):
        for k in range(STEPS):
            update(model, optimizer, k=k)
            between(model, k)
    return model, whence.Run.open(path), messages


def attributed(model: nn.Module, run: whence.Run, data: Any = DATA) -> whence.Scores:
    study = whence.Study(model, whence.Classification(), data, run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return whence.TracIn().attribute(study, DATA, progress=False)


def test_a_training_that_is_seen_whole_has_no_warnings(tmp_path: Path) -> None:
    model, run, messages = recorded(tmp_path)
    assert not messages and not run.warnings
    scores = attributed(model, run)
    assert not scores.warnings and "warning" not in repr(scores)


def clamp(model: nn.Module, k: int) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


def max_norm(model: nn.Module, k: int) -> None:
    with torch.no_grad():
        weight = model[0].weight
        weight.copy_(torch.renorm(weight, 2, 0, 0.3))


def averaged(model: nn.Module, k: int) -> None:
    start = dict(net().named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.data.lerp_(start[name], 0.1)


def once(model: nn.Module, k: int) -> None:
    if k == 9:
        model.load_state_dict(net().state_dict())


def reset(model: nn.Module, k: int) -> None:
    if k == 9:
        model[4].reset_parameters()


def permuted(model: nn.Module, k: int) -> None:
    weight = model[4].weight
    weight.data = weight.data[[1, 2, 0]]


def negated(model: nn.Module, k: int) -> None:
    with torch.no_grad():
        model[4].weight.neg_()


@pytest.mark.parametrize("change", [clamp, max_norm, averaged, once, reset, permuted, negated])
def test_weights_changed_between_updates(change: Callable[..., None], tmp_path: Path) -> None:
    model, run, messages = recorded(tmp_path, change)
    assert any("not by the recorded optimizer" in m for m in messages)
    assert any("not by the recorded optimizer" in m for m in run.warnings)
    scores = attributed(model, run)
    assert all(message in scores.warnings for message in run.warnings)
    assert "warning" in repr(scores)
    scores.save(tmp_path / "scores")
    assert whence.Scores.load(tmp_path / "scores").warnings == scores.warnings


def test_weights_swapped_for_an_evaluation_and_restored_are_no_change(tmp_path: Path) -> None:
    def evaluate(model: nn.Module, k: int) -> None:
        before = copy.deepcopy(model.state_dict())
        model.load_state_dict(net().state_dict())
        model.load_state_dict(before)

    _, run, messages = recorded(tmp_path, evaluate)
    assert not messages and not run.warnings


@pytest.mark.parametrize("steps", [None, [5, 10, 15]])
def test_best_weights_loaded_at_the_end(steps: Any, tmp_path: Path) -> None:
    """`steps` ends before the last update: then the last checkpoint has the loaded weights."""
    best: dict[str, Tensor] = {}

    def load(model: nn.Module, k: int) -> None:
        if k == 9:
            best.update(copy.deepcopy(model.state_dict()))
        if k == STEPS - 1:
            model.load_state_dict(best)

    options = {} if steps is None else {"checkpoints": steps, "total_steps": None}
    model, run, messages = recorded(tmp_path, load, **options)
    (message,) = [m for m in run.warnings if "after the last update, 20" in m]
    assert message in messages
    final = run.final.weights()
    same = all(torch.equal(final[name], p) for name, p in model.state_dict().items())
    assert same == (steps is not None)
    if steps is None:
        assert "those after update 10" in message
        scores = attributed(model, run)
        assert any(
            "given model has the run's weights after update 10" in m for m in scores.warnings
        )


GRADIENTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "clipped": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05),
    "clipped by value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
    "noise": lambda parameters: [p.grad.add_(torch.randn_like(p)) for p in parameters],
    "masked": lambda parameters: parameters[0].grad[0].zero_(),
    "replaced": lambda parameters: setattr(parameters[0], "grad", torch.ones_like(parameters[0])),
    "one layer divided": lambda parameters: parameters[0].grad.div_(2),
}


def trained_with(
    path: Path, change: Callable[[list[Tensor]], Any], **options: Any
) -> tuple[nn.Module, whence.Run]:
    """A training that does something between the backward pass and the update."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with whence.Recorder(path, model, optimizer, checkpoints=2, total_steps=6, **options):
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            change(list(model.parameters()))
            optimizer.step()
    return model, whence.Run.open(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", GRADIENTS)
def test_gradients_changed_before_the_update(how: str, tmp_path: Path) -> None:
    model, run = trained_with(tmp_path, GRADIENTS[how])
    (message,) = [m for m in run.warnings if "gradients were changed" in m]
    assert "update 1" in message and "0.weight (norm × " in message
    assert message in attributed(model, run).warnings
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e3),
        lambda parameters: [p.grad.div_(3) for p in parameters],  # accumulation
        lambda parameters: [p.grad.mul_(2.0**-12) for p in parameters],  # a scaler
    ],
)
def test_gradients_that_may_be_changed(change: Any, tmp_path: Path) -> None:
    model, run = trained_with(tmp_path, change)
    assert not run.warnings
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.filterwarnings("ignore:kept with the run")
def test_a_change_of_gradients_that_is_noted_has_one_warning(tmp_path: Path) -> None:
    model, run = trained_with(tmp_path, GRADIENTS["clipped"], notes={"clip_norm": 0.05})
    assert not run.warnings and any("clip_norm" in m for m in attributed(model, run).warnings)


def test_gradients_that_a_closure_computes(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure() -> Tensor:
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    with whence.Recorder(tmp_path, model, optimizer, checkpoints=2, total_steps=6):
        for _ in range(6):
            optimizer.zero_grad(set_to_none=False)
            optimizer.step(closure)
    assert not whence.Run.open(tmp_path).warnings


def test_a_scripted_model_is_refused(tmp_path: Path) -> None:
    model, run, _ = recorded(tmp_path)
    with pytest.raises(whence.WhenceError, match="give the module that was scripted"):
        whence.Study(torch.jit.script(model), whence.Classification(), DATA, run)


def test_a_second_optimizer(tmp_path: Path) -> None:
    model = net()
    body = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], 0.1)
    head = torch.optim.Adam(model[4].parameters(), 0.01)
    with (
        heard() as messages,
        whence.Recorder(tmp_path, model, body, checkpoints=4, total_steps=STEPS),
    ):
        for k in range(STEPS):
            update(model, body, head, k=k)
    assert any("second optimizer" in m and "4.bias, 4.weight" in m for m in messages)
    run = whence.Run.open(tmp_path)
    scores = attributed(model, run)
    assert any("differ between checkpoints" in m and "4.weight" in m for m in scores.warnings)
    assert [part["name"] for part in scores.excluded] == ["4"]
    assert "frozen" not in scores.excluded[0]["reason"]


def test_a_second_optimizer_of_the_same_layers(tmp_path: Path) -> None:
    model = net()
    first, second = (torch.optim.SGD(model.parameters(), lr) for lr in (0.1, 0.05))
    with (
        heard() as messages,
        whence.Recorder(tmp_path, model, first, checkpoints=4, total_steps=STEPS),
    ):
        for k in range(STEPS):
            update(model, first, k=k)
            update(model, second, k=k + 1)
    assert any("not by the recorded optimizer" in m for m in messages)


@pytest.mark.parametrize("every", [1, 2])
def test_layers_that_no_gradient_reaches(every: int, tmp_path: Path) -> None:
    """The optimizer has them, but only some updates reach them: `every` = 1, never."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        heard() as messages,
        whence.Recorder(tmp_path, model, optimizer, checkpoints=4, total_steps=STEPS),
    ):
        for k in range(STEPS):
            optimizer.zero_grad()
            features = model[:2](X)
            features = features.detach() if k % every == 0 else features
            F.cross_entropy(model[2:](features), Y).backward()
            optimizer.step()
    scores = attributed(model, whence.Run.open(tmp_path))
    if every == 1:
        assert [(part["name"], part["reason"]) for part in scores.excluded] == [
            ("0", "frozen: no update of the run moved it")
        ]
        assert not messages and not scores.warnings
    else:
        (message,) = [m for m in scores.warnings if "had no gradient in some of the 20" in m]
        assert "0.weight (10)" in message and message in messages and not scores.excluded


def test_an_optimizer_that_maximises(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, maximize=True)
    with whence.Recorder(tmp_path, model, optimizer, checkpoints=1, total_steps=2):
        update(model, optimizer)
        update(model, optimizer)
    (message,) = attributed(model, whence.Run.open(tmp_path)).warnings
    assert "maximize=True" in message


def test_a_step_that_calls_the_step_of_its_parent_is_one_update(tmp_path: Path) -> None:
    class Halving(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                p.grad /= 2
            return super().step(closure)

    torch.optim.SGD(net().parameters(), 0.1)  # torch adds hooks to a class when it is first used
    model = net()
    optimizer = Halving(model.parameters(), 0.1)
    with whence.Recorder(tmp_path, model, optimizer, checkpoints=4, total_steps=STEPS) as recorder:
        for k in range(STEPS):
            recorder.step([k])
            update(model, optimizer, k=k)
    run = whence.Run.open(tmp_path)
    assert run.steps == STEPS and [c.step for c in run.checkpoints] == [5, 10, 15, 20]
    assert not run.warnings


def test_settings_without_a_number_are_recorded(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adafactor(model.parameters())  # eps=(None, 0.001)
    with whence.Recorder(tmp_path, model, optimizer, checkpoints=1, total_steps=1):
        update(model, optimizer)
    assert whence.Run.open(tmp_path).hyperparameters[0]["eps"] == [None, 0.001]


def test_changes_of_frozen_layers_in_checkpoints_of_any_origin() -> None:
    states = [net().state_dict()]
    for k in range(2):
        states.append({name: t + 0.1 * (k + 1) for name, t in states[0].items()})
    run = whence.Run.from_checkpoints(
        states, [0, 5, 10], 0.1, groups=[["0.weight", "0.bias", "2.weight", "2.bias"]]
    )
    scores = attributed(net(), run)
    assert any("differ between checkpoints" in m and "4.weight" in m for m in scores.warnings)


def test_layers_that_stay_are_frozen_without_a_warning() -> None:
    states = [net().state_dict()]
    for k in range(2):
        moved = {n: t + 0.1 * (k + 1) * (not n.startswith("4")) for n, t in states[0].items()}
        states.append(moved)
    run = whence.Run.from_checkpoints(
        states, [0, 5, 10], 0.1, groups=[["0.weight", "0.bias", "2.weight", "2.bias"]]
    )
    assert not attributed(net(), run).warnings


@pytest.mark.parametrize("how", ["added", "swapped", "another optimizer", "untrained"])
@pytest.mark.parametrize("classes", [3, 7])
def test_a_head_replaced_without_a_stage(how: str, classes: int, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        heard() as messages,
        whence.Recorder(tmp_path, model, optimizer, checkpoints=4, total_steps=STEPS),
    ):
        used = optimizer
        for k in range(STEPS):
            if k == 12:
                model[4] = nn.Linear(5, classes)
                fresh = list(model[4].parameters())
                if how == "added":
                    used.add_param_group({"params": fresh})
                elif how == "swapped":
                    used.param_groups[0]["params"][-2:] = fresh
                elif how == "another optimizer":
                    used = torch.optim.SGD(model.parameters(), 0.1)
            update(model, used, k=k)
    assert any("replaced" in m and f"4.weight (3, 5) → ({classes}, 5)" in m for m in messages)
    run = whence.Run.open(tmp_path)
    if how in ("added", "swapped"):  # the new head's rates are recorded
        assert run.learning_rates[-1][[g for g, n in enumerate(run.groups) if "4.bias" in n][-1]]
    if classes == 3:
        assert any("replaced" in m for m in attributed(model, run).warnings)


def test_a_head_replaced_after_a_stage_is_no_surprise(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        heard() as messages,
        whence.Recorder(tmp_path, model, optimizer, checkpoints=2, total_steps=10) as recorder,
    ):
        for k in range(10):
            update(model, optimizer, k=k)
        recorder.stage("tune", total_steps=10, checkpoints=2)
        model[4] = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder.stage("tune", total_steps=10, checkpoints=2, optimizer=optimizer)
        for k in range(10):
            update(model, optimizer, k=k)
    assert not messages and not whence.Run.open(tmp_path).warnings


@pytest.mark.parametrize("other", ["later", "averaged", "clamped", "scaled"])
def test_a_model_that_is_not_the_runs_final_one(other: str, tmp_path: Path) -> None:
    model, run, _ = recorded(tmp_path)
    if other == "later":
        update(model, torch.optim.SGD(model.parameters(), 0.1))
    elif other == "averaged":
        averaged(model, 0)
    elif other == "scaled":  # further away than the run's first weights
        model[4].weight.data *= 1.6
    else:
        limit = 0.95 * float(model[0].weight.detach().abs().max())
        model[0].weight.data.clamp_(-limit, limit)
    assert any("not the run's final ones" in m for m in attributed(model, run).warnings)


def test_a_model_that_only_gives_the_architecture(tmp_path: Path) -> None:
    _, run, _ = recorded(tmp_path)
    assert not attributed(net(), run).warnings
    torch.manual_seed(5)
    assert not attributed(models.mlp((4, 6, 5, 3)), run).warnings


# --- batches --------------------------------------------------------------------------------------


def drawn(batches: list[np.ndarray], subset: Any = None) -> whence.Run:
    states = [net().state_dict()]
    states += [{n: t + 0.01 * (k + 1) for n, t in states[0].items()} for k in range(2)]
    steps = [0, len(batches) // 2, len(batches)]
    return whence.Run.from_checkpoints(states, steps, 0.1, batches=batches, subset=subset)


def epochs(examples: Any, count: int, size: int = 4, drop_last: bool = False) -> list[np.ndarray]:
    random, batches = np.random.default_rng(0), []
    for _ in range(count):
        order = random.permutation(examples)
        whole = len(order) // size * size if drop_last else len(order)
        batches += np.array_split(order[:whole], range(size, whole, size))
    return batches


def test_examples_that_were_never_drawn_are_not_in_the_training_set() -> None:
    subset = np.arange(0, 24, 2)
    run = drawn(epochs(subset, 3))
    study = whence.Study(net(), whence.Classification(), DATA, run)
    assert study.used(run, "train").tolist() == subset.tolist()
    declared = whence.Study(net(), whence.Classification(), DATA, drawn(epochs(subset, 3), subset))
    options: dict[str, Any] = {"dtype": torch.float64, "progress": False}
    with heard() as messages:
        scores = whence.Source(2).attribute(study, DATA, **options)
    assert any("12 of 24 examples are in none" in m for m in messages)
    assert scores.warnings
    expected = whence.Source(2).attribute(declared, DATA, **options)
    assert not expected.warnings
    np.testing.assert_array_equal(scores.values, expected.values)


REGULAR = {
    "shuffled": epochs(np.arange(24), 4),
    "drop_last": epochs(np.arange(24), 3, 7, drop_last=True),
    "one epoch, drop_last": epochs(np.arange(24), 1, 7, drop_last=True),
    "with replacement": [np.random.default_rng(k).integers(0, 24, 8) for k in range(12)],
    "one epoch with replacement": [np.random.default_rng(k).integers(0, 24, 8) for k in range(3)],
}


@pytest.mark.parametrize("name", REGULAR)
def test_ordinary_batches_are_no_surprise(name: str) -> None:
    run = drawn(REGULAR[name])
    study = whence.Study(net(), whence.Classification(), DATA, run)
    assert len(study.used(run, "train")) == 24
    assert [m for m in study.warnings(run) if "weighted" in m or "curriculum" in m] == []


def test_a_training_of_less_than_an_epoch_is_announced() -> None:
    run = drawn(epochs(np.arange(12), 1))
    study = whence.Study(net(), whence.Classification(), DATA, run)
    assert len(study.used(run, "train")) == 24
    assert any("12 of 24 examples" in m for m in study.warnings(run))


@pytest.mark.parametrize("kind", ["weights", "repeated", "two epochs for some", "one twice"])
def test_a_weighted_sampler_is_announced_with_numbers(kind: str) -> None:
    random = np.random.default_rng(0)
    if kind == "weights":
        p = np.where(np.arange(24) < 6, 5.0, 1.0)
        batches = [random.choice(24, 8, p=p / p.sum()) for _ in range(60)]
    elif kind == "repeated":
        batches = epochs(np.r_[np.arange(24), np.repeat(np.arange(4), 20)], 3)
    elif kind == "one twice":
        batches = epochs(np.r_[np.arange(24), 7], 20)
    else:
        batches = epochs(np.arange(24), 5) + epochs(np.arange(4), 40)
    run = drawn(batches)
    counts = np.bincount(np.concatenate(batches), minlength=24)
    study = whence.Study(net(), whence.Classification(), DATA, run)
    (message,) = [m for m in study.warnings(run) if "weighted sampler" in m]
    assert f"{counts.min()} to {counts.max()} times (mean {counts.mean():.1f})" in message


@pytest.mark.filterwarnings("ignore")
def test_a_weighted_sampler_is_shown_everywhere(tmp_path: Path) -> None:
    """Stored with the scores, and first in repr, report and explorer."""
    run = drawn(epochs(np.r_[np.arange(24), np.repeat(np.arange(4), 20)], 3))
    study = whence.Study(net(), whence.Classification(), DATA, run)
    whence.TracIn().attribute(study, DATA, out=tmp_path / "scores", progress=False)
    scores = whence.Scores.load(tmp_path / "scores")
    (message,) = [m for m in scores.warnings if "weighted sampler" in m]
    assert "weighted sampler" in repr(scores)
    page = scores.report(tmp_path / "report.html", study=study).read_text()
    assert "weighted sampler" in page
    assert message in views.overview(scores)["warnings"]


def test_a_curriculum_is_announced() -> None:
    """Every example is drawn eight times, but half of them only in the second half of training."""
    run = drawn(epochs(np.arange(12), 8) + epochs(np.arange(12, 24), 8))
    study = whence.Study(net(), whence.Classification(), DATA, run)
    assert any("a curriculum?" in m for m in study.warnings(run))
    assert not any("weighted" in m for m in study.warnings(run))


def test_a_study_holds_the_runs_that_it_knows_something_of() -> None:
    """Else Python could give another run the same id, and the study would mix them up."""
    study = whence.Study(net(), whence.Classification(), DATA, drawn(epochs(np.arange(24), 3)))
    run = drawn(epochs(np.arange(12), 3))
    assert len(study.used(run, "train")) == 12
    known = weakref.ref(run)
    del run
    gc.collect()
    assert known() is not None


@pytest.mark.parametrize("indices", [[0.5, 1.0], ["a"], [float("nan")], [-1, 0], [1j]])
def test_indices_that_make_no_sense_are_refused(indices: Any, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises(whence.WhenceError, match=r"recorder.step\(indices\) (is|names)"),
        whence.Recorder(tmp_path, model, optimizer, total_steps=9) as recorder,
    ):
        recorder.step(indices)
    with pytest.raises(whence.WhenceError, match=r"a batch (is|names)"):
        drawn([np.asarray(indices)] * 4)


def test_a_mask_of_a_batch_is_the_examples_it_marks(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with whence.Recorder(tmp_path, model, optimizer, checkpoints=1, total_steps=1) as recorder:
        recorder.step(torch.arange(24) % 12 == 5)
        update(model, optimizer)
    assert [b.tolist() for b in whence.Run.open(tmp_path).batches or ()] == [[5, 17]]


def test_batches_of_another_dataset_are_refused() -> None:
    run = drawn([np.array([0, 30])] * 4)
    with pytest.raises(whence.WhenceError, match="used example 30, but the data has 24"):
        whence.Study(net(), whence.Classification(), DATA, run)


def test_a_head_that_is_replaced_after_training(tmp_path: Path) -> None:
    """The other layers still have the weights that training led to."""
    model, run, _ = recorded(tmp_path)
    model[4].reset_parameters()
    nn.init.normal_(model[4].weight, std=10.0)  # far from anything that training saw
    assert any("are not the run's final ones" in m for m in attributed(model, run).warnings)


@pytest.mark.parametrize("before", [True, False])
def test_batches_that_are_named_one_by_one(before: bool, tmp_path: Path) -> None:
    """With gradient accumulation, all but the last would be lost."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        heard() as messages,
        whence.Recorder(tmp_path, model, optimizer, checkpoints=1, total_steps=3) as recorder,
    ):
        for _ in range(3):
            for which in (torch.arange(12), torch.arange(12, 24)):
                if before:
                    recorder.step(which)
                (F.cross_entropy(model(X[which]), Y[which]) / 2).backward()
                if not before:
                    recorder.step(which)
            optimizer.step()
            optimizer.zero_grad()
    (message,) = [m for m in messages if "more than once before an update" in m]
    assert message in whence.Run.open(tmp_path).warnings


@pytest.mark.parametrize("finite", [True, False])
def test_an_update_that_is_skipped_names_its_batch_in_vain(finite: bool, tmp_path: Path) -> None:
    """As a scaler of mixed precision does where gradients overflow; or a loop that goes on."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        heard() as messages,
        whence.Recorder(tmp_path, model, optimizer, checkpoints=1, total_steps=3) as recorder,
    ):
        for k in range(5):
            recorder.step([k])
            if finite:
                optimizer.zero_grad()
            F.cross_entropy(model(X[:8]), Y[:8]).backward()
            if k in (1, 3):
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.mul_(1.0 if finite else torch.inf)
            else:
                optimizer.step()
            if not finite:
                optimizer.zero_grad()
    assert not [m for m in messages if "more than once" in m]
    batches = whence.Run.open(tmp_path).batches
    assert batches is not None and [list(b) for b in batches] == [[0], [2], [4]]
