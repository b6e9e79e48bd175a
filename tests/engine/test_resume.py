"""Killed anywhere and called again: the same bits. What was fitted is used again, nothing stale."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import forms, models
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
import whence.engine.scoring
import whence.persist.cache
import whence.persist.files
import whence.scores
from whence.layers.passes import Passes

EXACT = {"dtype": torch.float64, "progress": False}
TRAIN, QUERY = models.vectors(11), models.vectors(5, seed=1)
STEPS = [3, 6, 9]


def net(sizes: tuple[int, ...] = (4, 5, 4, 3)) -> nn.Module:
    torch.manual_seed(0)
    return models.mlp(sizes)


def recorded(folder: Path, **options: Any) -> whence.Run:
    model = net(**options)
    data = models.train_run(model, whence.Classification(), TRAIN, STEPS, 0.3)
    return data.run.save(folder)


def study(run: Any, model: nn.Module | None = None, **changes: Any) -> whence.Study:
    given = {"task": whence.Classification(), "train": TRAIN, "runs": run}
    return whence.Study(model or net(), **(given | changes))


@pytest.fixture
def run(tmp_path: Path) -> whence.Run:
    return recorded(tmp_path / "run")


class Interrupted(BaseException):
    pass


@pytest.fixture
def notes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    often(monkeypatch.setattr)


def often(put: Callable[..., None]) -> None:
    """Snapshots after every batch, progress after every chunk, chunks of a batch."""
    put(whence.persist.files.Throttle, "due", lambda _: True)
    put(whence.engine.scoring, "CHUNK", 4)


# --- killed -------------------------------------------------------------------------------------

# SOURCE in full: covariances and eigenvalues at three checkpoints, two segments, five queries, two
# at a time. The others begin where everything is fitted.
CALLS: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "source": (lambda: whence.Source.published(2), QUERY, {"by_segment": True}),
    "top": (lambda: whence.Source.published(2), QUERY, {"top": 3}),
    "self": (lambda: whence.Source.published(2), None, {}),
    "tracin": (whence.TracIn, QUERY, {}),
    "low-rank": (lambda: whence.Source.published(2), QUERY, {"query_rank": 2}),
}


def call(name: str, run: Any, out: Path | None) -> whence.Scores:
    method, query, options = CALLS[name]
    return method().attribute(study(run), query, out=out, batch_size=2, **EXACT, **options)


KILLED = """
    import os, shutil, signal, sys, torch
    from pathlib import Path
    sys.path[:0] = [sys.argv[1], sys.argv[1] + "/engine"]
    torch.set_num_threads(1)
    import test_resume as t
    from support.speed import fix_speed
    from whence.layers.passes import Passes

    def put(target, name, value=None):
        if isinstance(target, str):
            import importlib
            path, _, attribute = target.rpartition(".")
            target, name, value = importlib.import_module(path), attribute, name
        setattr(target, name, value)

    t.often(put)
    fix_speed()
    t.whence.engine.scoring.Scoring._at_once = lambda self: 2

    def forked(do):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                do()
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def all_kills(folder, name, at, stride):
        t.recorded(folder / "run")
        if name != "source":
            t.call("source", folder / "run", None)
        fresh = lambda k: shutil.copytree(folder / "run", folder / k / "run").parent
        here = fresh("whole")
        t.call(name, here / "run", here / "out")
        kills = 0
        while True:
            here = fresh(str(kills))

            def killed():
                owner, attribute = {"file": (os, "replace"), "batch": (Passes, "_batch")}[at]
                real, left = getattr(owner, attribute), [1 + stride * kills]

                def counting(*arguments):
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*arguments)

                setattr(owner, attribute, counting)
                t.call(name, here / "run", here / "out")

            code = forked(killed)
            if code == 0:
                shutil.rmtree(here)
                return
            assert code == -signal.SIGKILL, code
            assert forked(lambda: t.call(name, here / "run", here / "out")) == 0
            kills += 1

    for (name, at), stride in t.MOMENTS.items():
        all_kills(Path(sys.argv[2]) / f"{name}-{at}", name, at, stride)
"""
# What is killed where: before every n-th file is moved into place, or between batches.
MOMENTS = {
    ("source", "file"): 8,
    ("source", "batch"): 13,
    ("top", "file"): 3,
    ("self", "file"): 3,
    ("tracin", "file"): 3,
    ("low-rank", "file"): 2,
}


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "scores.json"
    }


def account(folder: Path) -> dict[str, Any]:
    """scores.json, without what it says about time."""
    meta = json.loads((folder / "out" / "scores.json").read_text())
    del meta["checksum"]
    for name in ("seconds", "cpu_seconds"):
        del meta["diagnostics"][name]
    return meta


@pytest.fixture(scope="module")
def survivors(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Path]]:
    """Folders of calls that were killed at ever later moments and made again; the first is that of
    a call that was not."""
    folder = tmp_path_factory.mktemp("killed")
    source = Path(whence.__file__).parents[1]
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(KILLED),
            str(Path(__file__).parents[1]),
            str(folder),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert ran.returncode == 0, ran.stderr

    def of(name: str, at: str) -> list[Path]:
        place = folder / f"{name}-{at}"
        count = len(list(place.glob("[0-9]*")))
        return [place / k for k in ["whole", *map(str, range(count))]]

    return of


killed = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@killed
@pytest.mark.parametrize(("name", "at"), MOMENTS)
def test_killed_at_any_moment_the_same_call_ends_with_the_same_bits(
    survivors: Callable[[str, str], list[Path]], name: str, at: str
) -> None:
    """SIGKILL before a file is put in its place, or between two batches."""
    whole, *folders = survivors(name, at)
    assert len(folders) > 3
    expected = content(whole)
    for folder in folders:
        found = content(folder)
        for file, data in expected.items():
            assert found[file] == data, (folder, file)


@killed
@pytest.mark.parametrize(("name", "at"), [("source", "file"), ("low-rank", "file")])
def test_a_resumed_call_gives_the_same_account_of_itself(
    survivors: Callable[[str, str], list[Path]], name: str, at: str
) -> None:
    """Shares, survival, what was left out: of all the work, not of what was left to do."""
    whole, *folders = survivors(name, at)
    for folder in folders:
        assert account(folder) == account(whole), folder


@killed
@pytest.mark.parametrize("name", ["source", "top"])
def test_a_killed_call_leaves_nothing_behind_once_it_is_finished(
    survivors: Callable[[str, str], list[Path]], name: str
) -> None:
    """Half-written factors may be gigabytes."""
    whole, *folders = survivors(name, "file")
    for folder in folders:
        assert set(content(folder)) == set(content(whole)), folder


@pytest.mark.usefixtures("notes_everything")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7, 0.95])
def test_interrupted_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Ctrl-C, then the same call on the same study in the same process."""
    batches = [0, -1]  # so far, and when to interrupt
    real = Passes._batch

    def interrupted(self: Passes, *arguments: Any) -> Any:
        batches[0] += 1
        if batches[0] == batches[1]:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(Passes, "_batch", interrupted)
    whole = call("source", recorded(tmp_path / "other"), tmp_path / "whole")
    needed = batches[0]
    given, kind = study(recorded(tmp_path / "run")), EXACT | {"batch_size": 2, "by_segment": True}
    batches[:] = [0, 1 + int(share * needed)]
    with pytest.raises(KeyboardInterrupt):
        whence.Source.published(2).attribute(given, QUERY, out=tmp_path / "out", **kind)
    found = whence.Source.published(2).attribute(given, QUERY, out=tmp_path / "out", **kind)
    assert np.array_equal(found.values, whole.values)
    assert batches[0] < needed + 20  # went on: at most the batches of a chunk and its queries more


@pytest.mark.usefixtures("notes_everything")
@pytest.mark.parametrize("batch_size", [2, 11, 5, 1])
def test_stopped_between_the_last_batch_and_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """The snapshot then holds every example; the last batch may have been a smaller one."""

    def stopped(*_: Any) -> None:
        raise Interrupted

    run, method = recorded(tmp_path / "run"), whence.Source.published(1)
    with monkeypatch.context() as patch:
        patch.setattr(whence.persist.cache.FactorCache, "put", stopped)
        with pytest.raises(Interrupted):
            method.attribute(study(run), QUERY, batch_size=batch_size, **EXACT)
    found = method.attribute(study(run), QUERY, batch_size=batch_size, **EXACT).values
    fresh = study(recorded(tmp_path / "other"))
    whole = method.attribute(fresh, QUERY, batch_size=batch_size, **EXACT).values
    assert np.array_equal(found, whole)


def test_finished_work_is_not_done_again(
    run: whence.Run, tmp_path: Path, counted: Counter[str]
) -> None:
    method, kind = whence.Source.published(2), EXACT | {"out": tmp_path / "out"}
    first = method.attribute(study(run), QUERY, **kind)
    counted.clear()
    again = method.attribute(study(run), QUERY, **kind)
    assert not counted and np.array_equal(first.values, again.values)


# --- factors are used again ---------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Passes by kind of work: "covariances", "eigenvalues", "other" (queries and scores)."""
    counts: Counter[str] = Counter()
    real = Passes.backward_passes

    def sweeps(
        self: Any, data: Any, blocks: Any, signal: Any, label: str | None = None, **more: Any
    ) -> Any:
        counts[(label or "other").split(",")[0]] += 1
        return real(self, data, blocks, signal, label, **more)

    monkeypatch.setattr(Passes, "backward_passes", sweeps)
    return counts


def fits(counted: Counter[str]) -> tuple[int, int]:
    return counted["covariances"], counted["eigenvalues"]


def test_a_second_method_does_not_fit_again(run: whence.Run, counted: Counter[str]) -> None:
    def passes(method: Any) -> tuple[int, int]:
        counted.clear()
        method.attribute(study(run), QUERY, **EXACT)
        return fits(counted)

    assert passes(whence.Source.published(3)) == (3, 3)
    assert passes(whence.Source.published(3)) == (0, 0)
    assert passes(whence.Source.published(3, damping=0.1)) == (0, 0)
    assert passes(whence.Influence.published()) == (0, 0)
    assert passes(whence.Influence.published("source")) == (0, 0)
    assert passes(whence.Source.published(1)) == (0, 3)  # another basis, of the same covariances
    assert passes(whence.Source.published(3, "kfac")) == (0, 0)
    assert passes(whence.Source.published(3, "diagonal")) == (0, 3)
    assert passes(whence.Source.published(2, "diagonal")) == (0, 0)
    assert passes(whence.Source.published(1, "identity")) == (0, 0)
    assert passes(whence.TracIn()) == (0, 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("curvature", ["ekfac", "kfac"])
def test_forms_of_adam_share_what_is_fitted(
    curvature: str, tmp_path: Path, counted: Counter[str]
) -> None:
    """One needs the Gauss-Newton matrix's own diagonal beside the factors, the other does not."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with whence.Recorder(tmp_path / "run", model, optimizer, checkpoints=3, total_steps=9):
        for _ in range(9):
            optimizer.zero_grad()
            whence.Classification().losses(model(TRAIN[:][0].float()), TRAIN[:]).mean().backward()
            optimizer.step()
    run, squares = whence.Run.open(tmp_path / "run"), 3 if curvature == "ekfac" else 0
    by_form = {
        "mixed": whence.Source.published(2, curvature),
        "exact": forms.exact(2, curvature),
        "diagonal": whence.Source.published(2, "diagonal"),
    }

    def scores(names: list[str], where: str) -> dict[str, tuple[np.ndarray, tuple[int, int]]]:
        found = {}
        for name in names:
            counted.clear()
            asked = study(run, cache=tmp_path / where)
            found[name] = by_form[name].attribute(asked, QUERY, **EXACT).values, fits(counted)
        return found

    alone = {name: scores([name], name)[name] for name in by_form}
    assert [alone[name][1] for name in by_form] == [(3, 3), (3, squares), (0, 3)]
    orders = {
        ("mixed", "exact"): [(3, 3), (0, 0)],
        ("exact", "mixed"): [(3, squares), (0, 3)],
        ("exact", "diagonal", "mixed"): [(3, squares), (0, 3), (0, 0)],
    }
    for order, passes in orders.items():
        found = scores(list(order), "-".join(order))
        assert [found[name][1] for name in order] == passes
        for name in order:
            assert np.array_equal(found[name][0], alone[name][0]), (order, name)


def test_what_is_read_again_gives_the_same_bits(run: whence.Run) -> None:
    for method in (
        whence.Source.published(2),
        whence.Source.published(2, "kfac"),
        whence.Influence.published(1e-3),
    ):
        first = method.attribute(study(run), QUERY, **EXACT).values
        assert np.array_equal(method.attribute(study(run), QUERY, **EXACT).values, first), method


def test_factors_in_memory_give_the_same_bits(run: whence.Run, counted: Counter[str]) -> None:
    weights = [c.weights() for c in run.checkpoints]
    loose = whence.Run.from_checkpoints(weights, STEPS, 0.3)
    given = study(loose)
    first = whence.Source.published(2).attribute(given, QUERY, **EXACT).values
    counted.clear()
    assert np.array_equal(whence.Source.published(2).attribute(given, QUERY, **EXACT).values, first)
    assert fits(counted) == (0, 0)
    assert np.array_equal(
        whence.Source.published(2).attribute(study(run), QUERY, **EXACT).values, first
    )


def test_a_cache_of_ones_own(run: whence.Run, tmp_path: Path, counted: Counter[str]) -> None:
    weights = [c.weights() for c in run.checkpoints]
    loose = whence.Run.from_checkpoints(weights, STEPS, 0.3)
    whence.Influence.published().attribute(study(loose, cache=tmp_path / "mine"), QUERY, **EXACT)
    assert list((tmp_path / "mine").glob("*.safetensors")) and not (run.path / "factors").exists()
    counted.clear()
    whence.Influence.published().attribute(study(loose, cache=tmp_path / "mine"), QUERY, **EXACT)
    assert fits(counted) == (0, 0)


# --- and nothing stale --------------------------------------------------------------------------


class Tempered(whence.Classification):
    """A setting that changes the loss, and one that its owner thinks private."""

    def __init__(self, temperature: float = 1.0, hidden: float = 1.0) -> None:
        super().__init__()
        self.temperature, self._hidden = temperature, hidden

    def logits(self, outputs: Tensor) -> Tensor:
        return super().logits(outputs) / self.temperature / self._hidden


class Scaled(nn.Module):
    """Computes something else with the same weights, and prints the same."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.net, self.scale = net(), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.scale)


def edited(factor: float) -> Any:
    """A task of the same name with another body, as after the user mended it."""

    class Mended(whence.Classification):
        def logits(self, outputs: Tensor) -> Tensor:
            return super().logits(outputs) * factor

    return Mended()


def flipped() -> TensorDataset:
    x, y = TRAIN.tensors
    y = y.clone()
    y[-1] = (y[-1] + 1) % 3
    return TensorDataset(x, y)


def moved() -> TensorDataset:
    x, y = TRAIN.tensors
    x = x.clone()
    x[-1, -1] += 1e-6
    return TensorDataset(x, y)


def shifting(examples: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(examples)
    return x + 1.0, y


Other = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # of the study, method and call
CHANGES: dict[str, Other] = {
    "labels": ({"train": flipped()}, {}, {}),
    "inputs": ({"train": moved()}, {}, {}),
    "more data": ({"train": models.vectors(12)}, {}, {}),
    "collate": ({"collate": shifting}, {}, {}),
    "task": ({"task": Tempered()}, {}, {}),
    "layers": ({"layers": ["0", "4"]}, {}, {}),
    "seed": ({}, {"seed": 1}, {}),
    "fisher": ({}, {"fisher": "exact"}, {}),
    "empirical": ({}, {"fisher": "empirical"}, {}),
    "dtype": ({}, {}, {"dtype": torch.float32}),
}


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("name", CHANGES)
def test_nothing_stale_is_used(run: whence.Run, counted: Counter[str], name: str) -> None:
    whence.Source.published(3).attribute(study(run), QUERY, **EXACT)
    of_study, of_method, of_call = CHANGES[name]
    counted.clear()
    method, given = whence.Source.published(3, **of_method), study(run, **of_study)
    found = method.attribute(given, QUERY, **(EXACT | of_call)).values
    assert fits(counted) == (3, 3)
    weights = [c.weights() for c in run.checkpoints]
    loose = whence.Run.from_checkpoints(weights, STEPS, 0.3)
    fresh = study(loose, **of_study)
    assert np.array_equal(found, method.attribute(fresh, QUERY, **(EXACT | of_call)).values)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Tempered(1.0), Tempered(2.0)),
        (Tempered(1.0, 1.0), Tempered(1.0, 2.0)),
        (edited(1.0), edited(2.0)),
    ],
    ids=["setting", "private setting", "body"],
)
def test_factors_of_another_task_are_not_used(
    run: whence.Run, counted: Counter[str], one: Any, other: Any
) -> None:
    whence.Influence.published().attribute(study(run, task=one), QUERY, **EXACT)
    counted.clear()
    whence.Influence.published().attribute(study(run, task=other), QUERY, **EXACT)
    assert fits(counted) == (1, 1)


def test_factors_of_another_forward_are_not_used(tmp_path: Path, counted: Counter[str]) -> None:
    """The same weights and the same repr."""
    run = whence.Run.from_checkpoints([Scaled(1.0).state_dict()], [4], 0.3).save(tmp_path / "run")
    whence.Influence.published().attribute(study(run, Scaled(1.0)), QUERY, **EXACT)
    counted.clear()
    whence.Influence.published().attribute(study(run, Scaled(2.0)), QUERY, **EXACT)
    assert fits(counted) == (1, 1)


def test_scores_of_another_forward_are_not_used(tmp_path: Path) -> None:
    run = whence.Run.from_checkpoints([Scaled(1.0).state_dict()], [4], 0.3)
    kind = EXACT | {"out": tmp_path / "out"}
    whence.TracIn().attribute(study(run, Scaled(1.0)), QUERY, **kind)
    with pytest.raises(ValueError, match="another calculation"):
        whence.TracIn().attribute(study(run, Scaled(2.0)), QUERY, **kind)


def test_data_changed_in_place_under_the_same_study(run: whence.Run, counted: Counter[str]) -> None:
    train = TensorDataset(*(t.clone() for t in TRAIN.tensors))
    given = study(run, train=train)
    whence.Influence.published().attribute(given, QUERY, **EXACT)
    train.tensors[1][0] = (train.tensors[1][0] + 1) % 3  # the user mends a label
    counted.clear()
    found = whence.Influence.published().attribute(given, QUERY, **EXACT).values
    assert fits(counted) == (1, 1)
    fresh = whence.Influence.published().attribute(study(run, train=train), QUERY, **EXACT).values
    np.testing.assert_allclose(found, fresh, rtol=1e-9)


@pytest.mark.parametrize("change", ["weights", "step", "subset"])
def test_factors_of_another_run_are_not_used(
    run: whence.Run, tmp_path: Path, counted: Counter[str], change: str
) -> None:
    weights = copy.deepcopy(run.final.weights())
    given: dict[str, Any] = {"checkpoints": [weights], "steps": [12], "learning_rates": 0.3}
    cache = tmp_path / "cache"

    def passes() -> tuple[int, int]:
        counted.clear()
        other = whence.Run.from_checkpoints(**given)
        whence.Influence.published().attribute(study(other, cache=cache), QUERY, **EXACT)
        return fits(counted)

    assert passes() == (1, 1)
    assert passes() == (0, 0)
    if change == "weights":
        weights["0.weight"][0, 0] += 1e-6
    elif change == "step":  # pseudo-targets are drawn anew at each
        given["steps"] = [13]
    else:
        given["subset"] = list(range(9))
    assert passes() == (1, 1)


def interrupt_source(
    run: whence.Run, batches: int, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attribute, and stop after this many batches."""
    real, left = Passes._batch, [batches]

    def interrupted(self: Passes, *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Passes, "_batch", interrupted)
        with pytest.raises(Interrupted):
            method = whence.Source.published(2)
            method.attribute(study(run), QUERY, batch_size=batch_size, **EXACT)


@pytest.mark.usefixtures("notes_everything")
def test_a_snapshot_of_other_data_is_not_used(
    run: whence.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_source(run, 7, batch_size=2, monkeypatch=monkeypatch)
    assert list((run.path / "factors").glob("*.partial.safetensors"))
    found = whence.Source.published(2).attribute(
        study(run, train=flipped()), QUERY, batch_size=2, **EXACT
    )
    weights = [c.weights() for c in run.checkpoints]
    loose = study(whence.Run.from_checkpoints(weights, STEPS, 0.3), train=flipped())
    fresh = whence.Source.published(2).attribute(loose, QUERY, batch_size=2, **EXACT)
    assert np.array_equal(found.values, fresh.values)


@pytest.mark.usefixtures("notes_everything")
def test_a_snapshot_made_with_other_batches_is_taken_up(
    run: whence.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 3 up to where it stopped, batches of 3 from there on, whatever is asked now."""
    interrupt_source(run, 4, batch_size=3, monkeypatch=monkeypatch)
    found = whence.Source.published(2).attribute(study(run), QUERY, batch_size=5, **EXACT).values
    fresh = study(recorded(tmp_path / "other"))
    whole = whence.Source.published(2).attribute(fresh, QUERY, batch_size=5, **EXACT).values
    np.testing.assert_allclose(found, whole, rtol=1e-9)


# --- memory, the strongest, workers -------------------------------------------------------------

WIDE = (4, 60, 60, 3)


@pytest.mark.parametrize(
    "method", [whence.Source.published(2), whence.Influence.published(1e-3), whence.TracIn()]
)
def test_little_memory_splits_the_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    from whence.engine.scoring import Scoring

    run, query, blocks = recorded(tmp_path / "run", sizes=WIDE), models.vectors(12, seed=1), []
    real = Scoring._at_once
    monkeypatch.setattr(Scoring, "_at_once", lambda self: blocks.append(real(self)) or blocks[-1])
    kind = EXACT | {"batch_size": 8}
    plenty = method.attribute(study(run, net(WIDE)), query, **kind).values
    little = method.attribute(study(run, net(WIDE)), query, memory="1MB", **kind).values
    mine = method.attribute(study(run, net(WIDE)), memory=2**20, **kind).values
    assert blocks[0] >= 12 and 1 <= blocks[1] < 6 and blocks[2] == blocks[1]
    np.testing.assert_allclose(little, plenty, rtol=1e-9, atol=1e-12 * abs(plenty).max())
    # if but one term's vectors fit, they are made anew for each chunk of examples
    monkeypatch.setattr(Scoring, "_fits", lambda self, queries: False)
    monkeypatch.setattr("whence.engine.scoring.CHUNK", 8)
    monkeypatch.setattr("whence.engine.scoring.EXAMPLES_PER_QUERY", 0)
    kind |= {"batch_size": 2}
    anew = method.attribute(study(run, net(WIDE)), query, by_segment=True, **kind)
    for found in (anew.values, anew.by_segment.sum(0)):
        np.testing.assert_allclose(found, plenty, rtol=1e-9, atol=1e-12 * abs(plenty).max())
    diagonal = method.attribute(study(run, net(WIDE)), TRAIN, **kind).values.diagonal()
    np.testing.assert_allclose(mine, diagonal, rtol=1e-9, atol=1e-12 * abs(diagonal).max())


@pytest.mark.parametrize("method", [whence.Source.published(2), whence.TracIn()])
def test_one_terms_vectors_are_gone_before_the_next_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    from whence.engine.scoring import Scoring
    from whence.operators.products import FactoredReadout, Readout

    monkeypatch.setattr(Scoring, "_fits", lambda self, queries: False)
    made, alive = [], []
    real = Scoring._gradients

    def looking(self: Any, term: Any, *rest: Any) -> Any:
        kinds = (Readout, FactoredReadout)
        alive.append(sum(isinstance(thing, kinds) for thing in gc.get_objects()))
        made.append(term)
        return real(self, term, *rest)

    monkeypatch.setattr(Scoring, "_gradients", looking)
    layers, run = 3, recorded(tmp_path / "run", sizes=WIDE)
    gc.collect()
    method.attribute(study(run, net(WIDE)), QUERY, **EXACT)
    assert len(made) > 1 and alive == [layers] * len(made)


@pytest.mark.parametrize("memory", ["1MB", "3 MiB", "0.5GB", 2**30])
def test_memory_chooses_the_batches_and_not_the_scores(run: whence.Run, memory: Any) -> None:
    plain = whence.Source.published(2).attribute(study(run), QUERY, **EXACT).values
    found = whence.Source.published(2).attribute(study(run), QUERY, memory=memory, **EXACT).values
    np.testing.assert_allclose(found, plain, rtol=1e-9)


@pytest.mark.parametrize("measurement", ["margin", "loss"])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("k", [1, 4, 100])
def test_top_is_the_top_of_all(
    run: whence.Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measurement: str,
    on_disk: bool,
    k: int,
) -> None:
    monkeypatch.setattr(whence.engine.scoring, "CHUNK", 4)
    kind = EXACT | {"batch_size": 2}
    given = study(run, task=whence.Classification(measurement))
    whole = whence.Source.published(2).attribute(given, QUERY, **kind)
    out = tmp_path / "top" if on_disk else None
    top = whence.Source.published(2).attribute(given, QUERY, top=k, out=out, **kind)
    count = min(k, len(TRAIN))
    for query in range(len(QUERY)):
        for end in ("helpful", "harmful"):
            expected = getattr(whole, end)(query, count)
            found = getattr(top, end)(query, count)
            assert found.examples == expected.examples
            np.testing.assert_allclose([e.value for e in found], [e.value for e in expected], 1e-9)
    with pytest.raises(ValueError, match=f"only each query's top {count}"):
        _ = top.values


def test_workers_give_the_same_bits(tmp_path: Path) -> None:
    found = []
    for workers in (0, 2):
        run = recorded(tmp_path / str(workers))
        given = study(run, train=models.OneByOne(TRAIN))
        draws = torch.get_rng_state()
        kind = EXACT | {"batch_size": 6, "workers": workers}
        found.append(
            whence.Influence.published(1e-3).attribute(given, models.OneByOne(QUERY), **kind).values
        )
        assert torch.equal(torch.get_rng_state(), draws), (
            "the user's random numbers were drawn from"
        )
    assert np.array_equal(*found)


def test_the_users_data_is_not_changed(run: whence.Run) -> None:
    before = [t.clone() for t in (*TRAIN.tensors, *QUERY.tensors)]
    for method in (whence.Source.published(2), whence.Influence.published(), whence.TracIn()):
        for dtype in (torch.float64, torch.float32):
            method.attribute(study(run), QUERY, dtype=dtype, progress=False)
            method.attribute(study(run), dtype=dtype, progress=False)
    assert all(map(torch.equal, before, (*TRAIN.tensors, *QUERY.tensors)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_users_data_is_not_changed_by_a_model_that_works_in_place(dtype: torch.dtype) -> None:
    """A DataLoader gives copies, so such a model trains well."""

    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.clamp_(-1.0, 1.0))

    train, query = (
        TensorDataset(d.tensors[0].to(dtype, copy=True), d.tensors[1]) for d in (TRAIN, QUERY)
    )
    before = [t.clone() for t in (*train.tensors, *query.tensors)]
    run = whence.Run.from_checkpoints([Whitened().state_dict()], [4], 0.3)
    given = study(run, Whitened(), train=train)
    whence.Source.published(1).attribute(given, query, dtype=dtype, progress=False)
    assert all(map(torch.equal, before, (*train.tensors, *query.tensors)))


@pytest.mark.usefixtures("notes_everything")
@pytest.mark.parametrize("query", [QUERY, None], ids=["queries", "selves"])
def test_resumed_in_other_chunks_the_share_of_each_segment_is_the_same(
    query: Any, run: whence.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written already does not count twice."""

    def attribute(batch_size: int, **options: Any) -> whence.Scores:
        given = study(run, cache=tmp_path / "cache")
        options |= {"batch_size": batch_size, **EXACT}
        return whence.Source(3).attribute(given, query, **options)

    whole = attribute(11)
    write, blocks = whence.scores.ScoreWriter.write, iter(range(1))

    def once(self: Any, *block: Any) -> None:
        if next(blocks, None) is None:
            raise Interrupted
        write(self, *block)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(whence.scores.ScoreWriter, "write", once)
        patched.setattr(whence.engine.scoring.Scoring, "_at_once", lambda _: 2)
        attribute(2, out=tmp_path / "scores")
    resumed = attribute(11, out=tmp_path / "scores")
    np.testing.assert_allclose(resumed.values, whole.values, rtol=1e-10)
    shares = [
        [segment["share_of_score"] for segment in scores.diagnostics["segments"]]
        for scores in (resumed, whole)
    ]
    np.testing.assert_allclose(*shares, rtol=1e-9)
