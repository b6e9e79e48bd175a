"""Nothing computed with another loss, model or data is handed back: not factors, not scores.

Each case is a study before and after an edit that shows in none of the first examples.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import models
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import whence
from whence.errors import FolderConflict, InvalidInput
from whence.layers.passes import Passes
from whence.scores import ScoreWriter

QUIET = {"progress": False}
LAST = 20  # the first example of class 2
INPUTS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
INPUTS[LAST + 3, 0] = 5.0
LABELS = torch.arange(30) // 10
TRAIN = TensorDataset(INPUTS, LABELS)
QUERY = models.vectors(3, seed=1)
GLOBAL_WEIGHTS = torch.ones(3)


class Net(nn.Module):
    def __init__(self, far: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.far = far
        self.enter, self.leave = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        return self.leave(torch.where(x[:, :1] > 4.0, self.far * h, h))


def edited_net(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A class of the same name with another forward, as after running a notebook cell again."""
    namespace = {"__module__": Net.__module__, "__qualname__": "Net", "forward": forward}
    return type("Net", (Net,), namespace)()


class Weighted(whence.Classification):
    """Losses times what `weight` returns for the labels."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().losses(outputs, batch) * self.weight(batch[1])


class Tabled(whence.Classification):
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().losses(outputs, batch) * self.table[batch[1]].to(outputs)


class ByGlobal(whence.Classification):
    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().losses(outputs, batch) * GLOBAL_WEIGHTS.to(outputs)[batch[1]]


def by_closure(weight: float) -> Callable[[Tensor], Tensor]:
    weights = torch.tensor([1.0, 1.0, weight])

    def of(labels: Tensor) -> Tensor:
        return weights[labels]

    return of


def by_default(labels: Tensor, weight: float = 1.0) -> Tensor:
    return torch.where(labels == 2, weight, 1.0)


class Opaque:
    """No state that can be read: only what it does shows that it changed."""

    __slots__ = ("lock", "table")

    def __init__(self, weight: float, label: int = 2) -> None:
        self.lock, self.table = threading.Lock(), {label: weight}

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("not to be copied")

    def __call__(self, labels: Tensor) -> Tensor:
        with self.lock:
            return torch.tensor([self.table.get(int(k), 1.0) for k in labels])


class Callable2:
    def __init__(self, weight: float) -> None:
        self.inner = {"weights": [1.0, 1.0, weight]}

    def __call__(self, labels: Tensor) -> Tensor:
        return torch.tensor(self.inner["weights"])[labels]


class Forwarding(Dataset):
    """A wrapper that changes labels, and shows the attributes of what it wraps."""

    def __init__(self, flip: bool) -> None:
        self.inner, self.flip = TRAIN, flip
        self._fingerprint = "believe me"

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, k: int) -> Any:
        x, y = self.inner[k]
        return (x, 0 * y) if self.flip and k >= LAST else (x, y)


def class_of(body: Callable[..., Tensor], name: str = "losses") -> whence.Task:
    """A task whose class has another method, with the same name."""
    namespace = {"__module__": __name__, "__qualname__": "Mine", name: body}
    return type("Mine", (whence.Classification,), namespace)()


def plain_losses(self: Any, outputs: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, batch[1], reduction="none")


def doubled_losses(self: Any, outputs: Tensor, batch: Any) -> Tensor:
    losses = nn.functional.cross_entropy(outputs, batch[1], reduction="none")
    return losses * torch.where(batch[1] == 2, 2.0, 1.0)


def other_pseudo_losses(self: Any, outputs: Tensor, batch: Any, uniform: Any) -> Tensor:
    return 3 * whence.Classification.pseudo_losses(self, outputs, batch, uniform)


def same_pseudo_losses(self: Any, outputs: Tensor, batch: Any, uniform: Any) -> Tensor:
    return whence.Classification.pseudo_losses(self, outputs, batch, uniform)


def far_scaled(self: Any, x: Tensor) -> Tensor:
    h = torch.tanh(self.enter(x))
    return self.leave(torch.where(x[:, :1] > 4.0, 3.5 * h, h))


def detached(self: Any, x: Tensor) -> Tensor:
    h = torch.tanh(self.enter(x))
    return self.leave(0.5 * h + 0.5 * h.detach())


def long_table(changed: bool) -> Tensor:
    table = torch.ones(5000)
    table[2] = 3.0 if changed else 1.0
    return table


def with_global(weight: float) -> whence.Task:
    global GLOBAL_WEIGHTS
    GLOBAL_WEIGHTS = torch.tensor([1.0, 1.0, weight])
    return ByGlobal()


class Meta(type):
    scale = 1.0


class OfMeta(whence.Classification, metaclass=Meta):
    def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Any) -> Tensor:
        return type(self).scale * super().pseudo_losses(outputs, batch, uniform)


def with_metaclass(scale: float) -> whence.Task:
    Meta.scale = scale
    return OfMeta()


class Helped(whence.Classification):
    """Pseudo-losses through something that only its code tells apart."""

    def __init__(self, helper: Any) -> None:
        super().__init__()
        self.helper = helper

    def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Any) -> Tensor:
        return self.helper(super().pseudo_losses(outputs, batch, uniform))  # type: ignore[no-any-return]


def helper_object(new: bool) -> Any:
    call = (lambda self, x: 3 * x) if new else (lambda self, x: 1 * x)
    return type("Helper", (), {"__module__": __name__, "__call__": call})()


def helper_inside(losses: Tensor) -> Tensor:
    return losses


def helper_outside(losses: Tensor) -> Tensor:
    return helper_inside(losses)


def helper_function(new: bool) -> Any:
    globals()["helper_inside"] = (lambda x: 3 * x) if new else (lambda x: 1 * x)
    return helper_outside


class Scaled:
    """Its method is a setting; what it multiplies by is the object's."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def times(self, losses: Tensor) -> Tensor:
        return self.factor * losses


class ByTable:
    """Calls a function that it holds in a dict."""

    def __init__(self, function: Any) -> None:
        self.table = {"function": function}

    def __call__(self, losses: Tensor) -> Tensor:
        return self.table["function"](losses)  # type: ignore[no-any-return]


def half_detached(h: Tensor) -> Tensor:
    return 0.5 * h + 0.5 * h.detach()


def with_hook(new: bool) -> nn.Module:
    """A hook that changes gradients, but no output."""
    model = Net()
    hook = (lambda m, x, y: half_detached(y)) if new else (lambda m, x, y: y)
    model.register_forward_hook(hook)
    return model


class Configured(Net):
    """Its activation is in a dict of settings."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.settings = {"activation": activation}

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.settings["activation"](self.enter(x)))


def half_detached_tanh(h: Tensor) -> Tensor:
    return half_detached(torch.tanh(h))


def plain_tanh(h: Tensor) -> Tensor:
    return torch.tanh(h)


#: changes of the study, before and after an edit
EDITS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "closure": lambda new: {"task": Weighted(by_closure(2.0 if new else 1.0))},
    "default": lambda new: {"task": Weighted(functools.partial(by_default, weight=1.0 + new))},
    "callable object": lambda new: {"task": Weighted(Callable2(1.0 + new))},
    "opaque object": lambda new: {"task": Weighted(Opaque(1.0 + new))},
    "long tensor": lambda new: {"task": Tabled(long_table(new))},
    "array in a tensor's place": lambda new: {"task": Tabled(Table(long_table(new)))},
    "global": lambda new: {"task": with_global(1.0 + new)},
    "method": lambda new: {"task": class_of(doubled_losses if new else plain_losses)},
    "pseudo-losses": lambda new: {
        "task": class_of(other_pseudo_losses if new else same_pseudo_losses, "pseudo_losses")
    },
    "metaclass": lambda new: {"task": with_metaclass(1.0 + new)},
    "class of an object": lambda new: {"task": Helped(helper_object(new))},
    "function behind a function": lambda new: {"task": Helped(helper_function(new))},
    "object of a bound method": lambda new: {"task": Helped(Scaled(1.0 + 2 * new).times)},
    "function in a dict of an object": lambda new: {"task": Helped(ByTable(helper_function(new)))},
    "hook": lambda new: {"model": with_hook(new)},
    "function in a dict of the model": lambda new: {
        "model": Configured(half_detached_tanh if new else plain_tanh)
    },
    "forward": lambda new: {"model": edited_net(far_scaled) if new else Net()},
    "attribute of the model": lambda new: {"model": Net(3.0 if new else 1.0)},
    "gradient": lambda new: {"model": edited_net(detached) if new else Net()},
    "wrapper": lambda new: {"train": Forwarding(new)},
}


class Table:
    """Like a tensor, but with a short repr."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.numpy()

    def __getitem__(self, k: Tensor) -> Tensor:
        return torch.from_numpy(self.values)[k]

    def __repr__(self) -> str:
        return "Table(...)"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    model = Net()
    models.train_run(model, whence.Classification(), models.vectors(30), [2, 4], 0.2).run.save(
        folder
    )
    return folder


def study(recorded: Path, cache: Path, **changes: Any) -> whence.Study:
    given = {"model": Net(), "task": whence.Classification(), "train": TRAIN}
    return whence.Study(**(given | changes), runs=recorded, cache=cache)


METHODS = {
    "source": lambda: whence.Source.published(2),
    "influence": lambda: whence.Influence.published(1e-3),
    "arnoldi": lambda: whence.Influence(damping=1e-3, solver="arnoldi"),
    "trak": lambda: whence.Trak(8, damping=1e-3),
}


@pytest.mark.parametrize("edit", EDITS)
def test_factors_and_scores_of_before_an_edit_are_not_used(
    edit: str, recorded: Path, tmp_path: Path
) -> None:
    change, method = EDITS[edit], METHODS["source"]()
    old = method.attribute(
        study(recorded, tmp_path / "a", **change(False)), QUERY, out=tmp_path / "out", **QUIET
    )
    new = study(recorded, tmp_path / "a", **change(True))
    with pytest.raises(FolderConflict, match="another calculation"):
        method.attribute(new, QUERY, out=tmp_path / "out", **QUIET)
    reused = method.attribute(new, QUERY, **QUIET).values
    afresh = method.attribute(
        study(recorded, tmp_path / "b", **change(True)), QUERY, **QUIET
    ).values
    np.testing.assert_array_equal(reused, afresh)
    assert abs(reused - old.values).max() > 0.01 * abs(old.values).max()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("edit", ["opaque object", "wrapper"])
def test_every_method_notices(edit: str, method: str, recorded: Path, tmp_path: Path) -> None:
    change, chosen = EDITS[edit], METHODS[method]()
    chosen.attribute(study(recorded, tmp_path / "a", **change(False)), QUERY, **QUIET)
    new = study(recorded, tmp_path / "a", **change(True))
    afresh = study(recorded, tmp_path / "b", **change(True))
    np.testing.assert_array_equal(
        chosen.attribute(new, QUERY, **QUIET).values,
        chosen.attribute(afresh, QUERY, **QUIET).values,
    )


def test_a_study_whose_task_changes_in_place(recorded: Path, tmp_path: Path) -> None:
    weight, method = Opaque(1.0), METHODS["source"]()
    same = study(recorded, tmp_path / "a", task=Weighted(weight))
    method.attribute(same, QUERY, **QUIET)
    weight.table[2] = 3.0
    afresh = study(recorded, tmp_path / "b", task=Weighted(Opaque(3.0)))
    np.testing.assert_array_equal(
        method.attribute(same, QUERY, **QUIET).values,
        method.attribute(afresh, QUERY, **QUIET).values,
    )


def test_a_hook_that_keeps_activations_is_no_edit(recorded: Path, tmp_path: Path) -> None:
    """What it keeps is different after every pass over the data."""
    kept: dict[str, Tensor] = {}

    def keeping() -> nn.Module:
        model = Net()
        model.enter.register_forward_hook(lambda module, x, y: kept.update(enter=y))
        return model

    folder, method = tmp_path / "out", METHODS["source"]()
    first = method.attribute(
        study(recorded, tmp_path / "a", model=keeping()), QUERY, out=folder, **QUIET
    )
    again = method.attribute(
        study(recorded, tmp_path / "a", model=keeping()), QUERY, out=folder, **QUIET
    )
    np.testing.assert_array_equal(first.values, again.values)


def test_factors_of_matrices_and_of_all_layers_share_a_cache(tmp_path: Path) -> None:
    """Published forms track linear layers only: neither answers for the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    run = models.train_run(model, whence.Classification(), models.vectors(30), [2, 4], 0.2).run

    def of(cache: str) -> whence.Study:
        return whence.Study(model, whence.Classification(), TRAIN, run, cache=tmp_path / cache)

    forms = [whence.Source(1), whence.Source.published(1)]
    alone = [form.attribute(of(f"{k}"), QUERY, **QUIET).values for k, form in enumerate(forms)]
    for order, name in (((0, 1), "a"), ((1, 0), "b")):
        for k in order:
            values = forms[k].attribute(of(name), QUERY, **QUIET).values
            np.testing.assert_array_equal(values, alone[k])
    forms[0].attribute(of("a"), QUERY, out=tmp_path / "out", **QUIET)
    matrices = whence.Study(
        model, whence.Classification(), TRAIN, run, cache=tmp_path / "a", layers="matrices"
    )
    with pytest.raises(FolderConflict, match="another calculation"):
        forms[0].attribute(matrices, QUERY, out=tmp_path / "out", **QUIET)


def test_what_differs_is_named(recorded: Path, tmp_path: Path) -> None:
    of, out = study(recorded, tmp_path / "a"), tmp_path / "out"
    whence.TracIn().attribute(of, QUERY, out=out, by_layer=True, **QUIET)
    with pytest.raises(FolderConflict, match=r"different: layers\)"):
        whence.TracIn().attribute(of, QUERY, out=out, **QUIET)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("edit", ["opaque object", "method", "wrapper"])
@pytest.mark.parametrize("method", [whence.TracIn, METHODS["source"]])
def test_a_resumed_matrix_is_of_one_loss(
    edit: str, method: Any, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, write, written = EDITS[edit], ScoreWriter.write, []

    def once(self: ScoreWriter, *block: Any) -> None:
        if written:
            raise Stopped
        written.append(block)
        write(self, *block)

    monkeypatch.setattr("whence.engine.scoring.CHUNK", 8)
    monkeypatch.setattr("whence.persist.files.Throttle.due", lambda _: True)
    options = {"out": tmp_path / "out", "batch_size": 2, **QUIET}
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(ScoreWriter, "write", once)
        method().attribute(study(recorded, tmp_path / "a", **change(False)), QUERY, **options)
    with pytest.raises(FolderConflict, match="another calculation"):
        method().attribute(study(recorded, tmp_path / "a", **change(True)), QUERY, **options)
    resumed = method().attribute(study(recorded, tmp_path / "a", **change(False)), QUERY, **options)
    whole = method().attribute(study(recorded, tmp_path / "b", **change(False)), QUERY, **QUIET)
    np.testing.assert_allclose(resumed.values, whole.values, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("label", [0, 2])  # of examples that were seen before, or were not
def test_a_resumed_pass_is_of_one_loss(
    label: int, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covariances that were half summed up belong to the loss of then."""
    real, seen = Passes._batch, []

    def change(new: bool) -> dict[str, Any]:
        return {"task": Weighted(Opaque(1.0 + new, label))}

    def few(self: Passes, *given: Any) -> Any:
        seen.append(given)
        if len(seen) > 2:
            raise Stopped
        return real(self, *given)

    monkeypatch.setattr("whence.persist.files.Throttle.due", lambda _: True)
    method, options = METHODS["source"](), {"batch_size": 4, **QUIET}
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(Passes, "_batch", few)
        method.attribute(study(recorded, tmp_path / "a", **change(False)), QUERY, **options)
    assert list((tmp_path / "a").glob("*.partial*"))
    new, afresh = (study(recorded, tmp_path / k, **change(True)) for k in "ab")
    np.testing.assert_array_equal(
        method.attribute(new, QUERY, **options).values,
        method.attribute(afresh, QUERY, **options).values,
    )


def test_a_resumed_sweep_is_of_one_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with whence.Recorder(tmp_path / "run", net, optimizer, checkpoints=[2, 4]) as recorder:
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(INPUTS), LABELS).backward()
            recorder.step(range(30))
            optimizer.step()

    def stop(*_: Any) -> None:
        raise Stopped

    change, out = EDITS["opaque object"], tmp_path / "out"
    monkeypatch.setattr("whence.persist.files.Throttle.due", lambda _: True)
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(ScoreWriter, "write", stop)
        old = study(tmp_path / "run", tmp_path / "a", **change(False))
        whence.Hydra().attribute(old, QUERY, out=out, **QUIET)
    assert (out / "sweep.safetensors").exists()
    new = study(tmp_path / "run", tmp_path / "a", **change(True))
    np.testing.assert_array_equal(
        whence.Hydra().attribute(new, QUERY, out=out, **QUIET).values,
        whence.Hydra().attribute(new, QUERY, **QUIET).values,
    )


def test_batch_size_and_rounding_do_not_matter(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, chosen = METHODS["source"](), study(recorded, tmp_path / "a")
    first = method.attribute(chosen, QUERY, out=tmp_path / "out", batch_size=7, **QUIET)

    def no_pass(*_: Any) -> None:
        raise AssertionError("fitted or scored again")

    monkeypatch.setattr(Passes, "backward_passes", no_pass)
    again = study(recorded, tmp_path / "a")
    for size in (3, 30):
        scores = method.attribute(again, QUERY, out=tmp_path / "out", batch_size=size, **QUIET)
        np.testing.assert_array_equal(scores.values, first.values)


def test_factors_are_used_again_with_another_batch_size(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = METHODS["source"]()
    method.attribute(study(recorded, tmp_path / "a"), QUERY, batch_size=7, **QUIET)
    signals = []
    real = Passes.backward_passes

    def counted(self: Any, data: Any, blocks: Any, signal: Any, *rest: Any, **more: Any) -> Any:
        signals.append(signal.name)
        return real(self, data, blocks, signal, *rest, **more)

    monkeypatch.setattr(Passes, "backward_passes", counted)
    method.attribute(study(recorded, tmp_path / "a"), QUERY, batch_size=11, **QUIET)
    assert "sampled" not in signals and "loss" in signals


def test_both_of_two_losses_stay_cached(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, change = METHODS["source"](), EDITS["opaque object"]
    first = [
        method.attribute(study(recorded, tmp_path / "a", **change(new)), QUERY, **QUIET).values
        for new in (False, True)
    ]
    monkeypatch.setattr(whence.operators.Fitter, "covariances", None)
    for new in (False, True):
        again = method.attribute(study(recorded, tmp_path / "a", **change(new)), QUERY, **QUIET)
        np.testing.assert_array_equal(again.values, first[new])


@pytest.mark.parametrize("edit", ["opaque object", "closure", "forward", "wrapper"])
def test_a_store_of_other_losses_is_refused(edit: str, recorded: Path, tmp_path: Path) -> None:
    change, folder = EDITS[edit], tmp_path / "store"
    settings = {"dimension": 8, "methods": ["tracin"], **QUIET}
    old = study(recorded, tmp_path / "a", **change(False))
    whence.GradientStore.build(old, folder, **settings)
    whence.GradientStore.open(folder, study(recorded, tmp_path / "a", **change(False)))
    new = study(recorded, tmp_path / "a", **change(True))
    with pytest.raises(InvalidInput, match="was built"):
        whence.GradientStore.open(folder, new)
    with pytest.raises(InvalidInput, match="was built"):
        whence.GradientStore.build(new, folder, **settings)


def test_scores_of_random_data_say_so(recorded: Path, tmp_path: Path) -> None:
    class Noisy(Forwarding):
        def __getitem__(self, k: int) -> Any:
            x, y = super().__getitem__(k)
            return (x + 1e-6 * torch.randn(4), y) if k >= LAST else (x, y)

    moving = study(recorded, tmp_path / "a", train=Noisy(False))
    with pytest.warns(UserWarning, match="differs between two reads"):
        scores = whence.TracIn().attribute(moving, QUERY, out=tmp_path / "out", **QUIET)
    assert any("differs between two reads" in text for text in scores.warnings)
    assert whence.Scores.load(tmp_path / "out").warnings == scores.warnings


def test_two_processes_that_fit_other_losses_at_the_same_time(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither knows of the other when it begins: the second one to store its factors is refused."""
    method, change, real = METHODS["source"](), EDITS["opaque object"], Passes._batch
    began = []

    def interrupted(self: Passes, *given: Any) -> Any:
        if not began:
            began.append(True)
            other = study(recorded, tmp_path / "a", **change(True))
            with torch.no_grad():
                method.attribute(other, QUERY, **QUIET)
        return real(self, *given)

    monkeypatch.setattr(Passes, "_batch", interrupted)
    with pytest.raises(FolderConflict, match="other losses"):
        method.attribute(study(recorded, tmp_path / "a", **change(False)), QUERY, **QUIET)


def test_cached_factors_need_no_permission_to_write(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = METHODS["source"]()
    first = method.attribute(study(recorded, tmp_path / "a"), QUERY, **QUIET)
    monkeypatch.setattr("whence.persist.cache.save_tensors", None)
    again = method.attribute(study(recorded, tmp_path / "a"), QUERY, **QUIET)
    np.testing.assert_array_equal(again.values, first.values)


def inside_a_module() -> Any:
    import settings_of_a_user

    class Pseudo(whence.Classification):
        def pseudo_losses(self, outputs: Tensor, *rest: Any) -> Tensor:
            return super().pseudo_losses(outputs, *rest) * settings_of_a_user.weight()

    return Pseudo()


def inside_a_function() -> Any:
    class Pseudo(whence.Classification):
        def pseudo_losses(self, outputs: Tensor, *rest: Any) -> Tensor:
            from settings_of_a_user import SCALE

            return super().pseudo_losses(outputs, *rest) * SCALE

    return Pseudo()


@pytest.mark.parametrize("make", [inside_a_module, inside_a_function])
def test_what_code_takes_from_a_module_of_yours_counts(
    make: Any, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pseudo-losses show in no loss and no output, only in the curvature."""
    module = types.ModuleType("settings_of_a_user")
    module.SCALE, module.weight = 1.0, lambda: 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "settings_of_a_user", module)
    method, answers = whence.Influence(0.1), []
    for scale in (1.0, 3.0, 1.0):
        module.SCALE = scale  # type: ignore[attr-defined]
        module.weight = (lambda: 1.0) if scale == 1.0 else (lambda: 3.0)  # type: ignore[attr-defined]
        study = whence.Study(Net(), make(), TRAIN, recorded)
        answers.append(method.attribute(study, QUERY, **QUIET).values)
    assert not np.allclose(answers[0], answers[1], rtol=1e-2)
    np.testing.assert_allclose(answers[0], answers[2])
