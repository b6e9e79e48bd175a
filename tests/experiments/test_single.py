"""The leaderboard's measurements, tiny: both protocols, resumed, and rows from saved sums."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import whence
from experiments.engine.rivals import RIVALS, measuring_losses, ridge
from experiments.studies import peers, single, smooth
from experiments.studies.publish import benchmark as publishing
from experiments.studies.publish import publish
from experiments.studies.sums import Sums
from experiments.tasks import board, data
from whence.evaluate import Benchmark, lds
from whence.retrain import Training, measure

TASK = "digits_smooth"


def run(monkeypatch: Any, folder: Path, *words: str) -> Any:
    places = ["--work", folder / "work", "--out", folder / "sums", "--results", folder]
    argv = ["single", *words, "--quick", *map(str, places)]
    monkeypatch.setattr(sys, "argv", argv)
    single.main()
    file = folder / "leaderboard.json"
    return json.loads(file.read_text())["protocols"] if file.exists() else None


def test_both_protocols_resume_and_agree_with_lds(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    first = run(monkeypatch, tmp_path, TASK, "--only", "MAGIC", "Random")
    assert set(first) == {p.name for p in board.PROTOCOLS}
    for name, tasks in first.items():
        entry = tasks[TASK]
        assert set(entry["methods"]) == {"Random", "Unrolled (MAGIC)"}
        assert -1 <= entry["metasmoothness"] <= 1
        best = [m for m, row in entry["methods"].items() if row["behind"] is None]
        assert len(best) == 1, name
        assert entry["methods"]["Unrolled (MAGIC)"]["seconds"] > 0
    assert first["single-0.99"][TASK]["methods"]["Unrolled (MAGIC)"]["lds"][0] > 0.95
    capsys.readouterr()

    def never(*args: Any) -> Any:
        raise AssertionError("computed again")

    monkeypatch.setattr(single, "attributed", never)
    again = run(monkeypatch, tmp_path, TASK, "--only", "MAGIC", "Random")
    assert again == first
    (tmp_path / "leaderboard.json").unlink()
    monkeypatch.setattr(single, "measure", never)
    assert run(monkeypatch, tmp_path, "--from", str(tmp_path / "sums")) == first
    (path,) = (tmp_path / "sums" / "single-0.99").glob("*.npz")
    saved = Sums.load(path)
    truth = saved.judge()
    assert truth.in_place and truth.seeds == [1000]
    value = lds(saved.scores("Random")[0], truth).value
    assert first["single-0.99"][TASK]["methods"]["Random"]["lds"][0] == pytest.approx(value)


def test_published_benchmarks_give_the_same_lds(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    board_rows = run(monkeypatch, tmp_path, TASK, "--only", "Random", "TracIn")
    places = publish(tmp_path / "sums", tmp_path / "published")
    assert len(places) == len(board.PROTOCOLS)
    for place in places:
        benchmark = Benchmark.open(place)
        entry = board_rows[place.parent.name][TASK]
        recipe, held_out = board.BOARD[TASK].recipe(True)
        query = Subset(held_out, range(board.QUICK.queries))
        study = whence.Study(
            recipe.build(0),
            recipe.task,
            recipe.stages[0].data.dataset,
            whence.Run.open(tmp_path / "work" / f"{TASK}-quick" / "run-1000"),
        )
        scores = whence.TracIn().attribute(study, query, progress=False)
        standing = benchmark.score(scores)
        if benchmark.truth.in_place:
            value = entry["methods"]["TracIn"]["lds"][0]
            assert standing.result.value == pytest.approx(value)
            assert standing.published["TracIn"].value == pytest.approx(value)
            assert "recipe.run(1000" in benchmark.about["how"]
        row = entry["methods"]["Random"]
        assert standing.published["Random"].value == pytest.approx(row["lds"][0])
        assert standing.seconds["Random"] == row["seconds"]
    path = next((tmp_path / "sums").rglob("*.npz"))
    saved = Sums.load(path)
    saved.truth["recipe"] = "of last year"
    with pytest.raises(ValueError, match="another version of the task"):
        publishing(saved)
    saved.save(path.parent)
    capsys.readouterr()
    assert len(publish(tmp_path / "sums", tmp_path / "again")) == len(places) - 1
    assert "is left out" in capsys.readouterr().out


def test_a_published_benchmark_takes_new_rows(tmp_path: Path, monkeypatch: Any) -> None:
    first = run(monkeypatch, tmp_path, TASK, "--only", "Random")
    places = publish(tmp_path / "sums", tmp_path / "published")
    # truths and rows are those of the benchmark: nothing but a run may be trained
    monkeypatch.setattr(single, "RESULTS", tmp_path)
    for name in ("retrained", "smoothness"):
        monkeypatch.setattr(single, name, None)
    monkeypatch.setattr(single, "ROUGH", -1.0)
    monkeypatch.setattr(single, "device_name", lambda device: "another machine")
    words = ("--published", str(tmp_path / "published"), "--only", "TracIn")
    again = run(monkeypatch, tmp_path / "again", TASK, *words)
    assert len(places) == len(again)
    for name, tasks in again.items():
        rows, before = tasks[TASK]["methods"], first[name][TASK]["methods"]["Random"]
        assert set(rows) == {"Random", "TracIn"}
        assert rows["Random"]["lds"] == pytest.approx(before["lds"], abs=1e-5)
        assert "device" not in rows["Random"] and rows["TracIn"]["device"] == "another machine"


def test_rows_of_several_files_of_sums(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The most seeds judge all methods; rows of other retrainings stay, and say so."""
    words = (TASK, "--only", "Random", "TracIn", "--protocols", "expected-0.5")
    (before,) = run(monkeypatch, tmp_path, *words)["expected-0.5"].values()
    (path,) = (tmp_path / "sums").rglob("*.npz")
    saved, few = Sums.load(path), before["sizes"]["seeds"]
    truth, noise = saved.truth, np.random.default_rng(0).normal(size=saved.measured.shape)
    more = replace(
        saved,
        protocol=replace(saved.protocol, seeds=5 * few),
        truth=truth | {"seeds": [*range(5 * few)]},
        about=saved.about | {"device": "another machine"},
        measured=np.concatenate([saved.measured, *[saved.measured + noise] * 4], 1),
        forms={"TracIn": saved.forms["TracIn"]},
        sums={"TracIn": saved.sums["TracIn"]},
        deviations={"TracIn": saved.deviations["TracIn"]},
    )
    folder = more.save(tmp_path / "more").parent
    assert more.protocol.file_name < saved.protocol.file_name  # as text
    saved.save(folder)
    (entry,) = run(monkeypatch, tmp_path, "--from", str(folder))["expected-0.5"].values()
    assert entry["sizes"]["seeds"] == 5 * few and set(entry["methods"]) == {"Random", "TracIn"}
    assert all("behind" in row and "sizes" not in row for row in entry["methods"].values())
    assert entry["methods"]["Random"]["device"] == before["device"]
    value = lds(saved.scores("Random"), more.judge()).single.value
    assert entry["methods"]["Random"]["lds"][0] == pytest.approx(value)
    assert value != pytest.approx(before["methods"]["Random"]["lds"][0], abs=1e-3)

    (folder / saved.protocol.file_name).unlink()  # only the new file
    again = run(monkeypatch, tmp_path, "--from", str(folder))["expected-0.5"][TASK]["methods"]
    assert again["TracIn"]["behind"] is None and "sizes" not in again["TracIn"]
    earlier = dict(entry["methods"]["Random"])
    del earlier["behind"], earlier["over"]
    assert again["Random"] == earlier | {"sizes": entry["sizes"]}

    more.truth["recipe"] = "of a later version"
    more.save(folder)
    last = run(monkeypatch, tmp_path, "--from", str(folder))["expected-0.5"][TASK]["methods"]
    assert set(last) == {"TracIn"}
    saved.save(folder)
    with pytest.raises(ValueError, match="other subsets, queries, recipes or models"):
        run(monkeypatch, tmp_path, "--from", str(folder))


def test_files_of_two_single_models_are_not_joined(tmp_path: Path, monkeypatch: Any) -> None:
    words = (TASK, "--only", "Random", "--protocols", "single-0.99")
    run(monkeypatch, tmp_path, *words)
    (path,) = (tmp_path / "sums").rglob("*.npz")
    saved, other = Sums.load(path), Sums.load(path)
    assert single.joined([saved, other]) is saved
    other.measured = other.measured + saved.measured.std()
    with pytest.raises(ValueError, match="or models"):
        single.joined([saved, other])
    file = tmp_path / "leaderboard.json"
    stored = json.loads(file.read_text())
    stored["protocols"]["single-0.99"][TASK]["sizes"]["quick"] = False
    file.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="small version"):
        single.judge([path], file)


def test_ridge_finds_the_coefficients_of_a_linear_truth() -> None:
    random = np.random.default_rng(0)
    masks = (random.random((60, 12)) < 0.5).astype(float)
    effects = random.normal(size=(3, 12))
    noise = 1e-6 * random.normal(size=(60, 3))
    np.testing.assert_allclose(ridge(masks, masks @ effects.T + noise), effects, atol=2e-2)
    flat = ridge(masks, random.normal(size=(60, 3)))
    assert np.abs(flat).max() < 0.5 * np.abs(effects).max()  # noise is shrunk


def test_rivals_of_many_models(tmp_path: Path, monkeypatch: Any) -> None:
    words = (TASK, "--only", "ridge", "Bayesian", "--models", "12", "--protocols", "expected-0.5")
    result = run(monkeypatch, tmp_path, *words)
    assert set(result["expected-0.5"][TASK]["methods"]) == set(RIVALS)
    recipe, _ = board.BOARD[TASK].recipe(True)
    changed = measuring_losses(recipe)
    data = recipe.stages[0].data.dataset
    (losses,) = measure(changed, data, [Training(3)], progress=False)
    model = recipe.train(3)
    x, y = data.tensors
    expected = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
    np.testing.assert_allclose(losses, expected.detach(), atol=1e-5)


def test_another_truth_in_the_folder_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    run(monkeypatch, tmp_path, TASK, "--only", "Random", "--protocols", "single-0.5")
    (path,) = (tmp_path / "sums").rglob("*.npz")
    saved = Sums.load(path)
    saved.truth["recipe"] = "another"
    saved.save(path.parent)
    with pytest.raises(ValueError, match="another truth"):
        run(monkeypatch, tmp_path, TASK, "--only", "Random", "--protocols", "single-0.5")


@pytest.mark.parametrize("name", ["concrete", "parkinsons", "mnist", "cifar10"])
def test_sizes_are_whole_batches(name: str, monkeypatch: Any) -> None:
    columns = np.zeros((7000, 8), np.float32)

    def table() -> Any:
        x = torch.from_numpy(columns)
        return TensorDataset(x, x[:, :1]), TensorDataset(x[:5], x[:5, :1])

    def images(name: str, train: int, *rest: Any, **more: Any) -> Any:
        x, y = torch.zeros(train, 784), torch.zeros(train, dtype=torch.long)
        return TensorDataset(x, y), TensorDataset(x[:5], y[:5])

    monkeypatch.setattr(data, "images", images)
    monkeypatch.setattr(data, "cifar10", lambda train: images("", train))
    experiment = board.BOARD[name]
    make = experiment.make
    if name in ("concrete", "parkinsons"):
        make = board.partial(board.rows, table, *make.args[1:])
    recipe, _ = make(False, *experiment.chosen_rates())
    (stage,) = recipe.stages
    assert len(stage.data) % stage.batch_size == 0


@pytest.mark.slow
def test_the_search_for_a_smooth_training(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    words = ["smooth", "gpt_smooth", "--quick", "--try", "rate=1e-3", "eps_root=1e-6,1e-4", "--lds"]
    words += ["--directions", "3", "--queries", "2", "--subsets", "6"]
    words += ["--out", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", words)
    smooth.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["of"]["settings"]["eps_root"] for row in rows] == [1e-6, 1e-4]
    assert all(-1 <= row["metasmoothness"] <= 1 and row["times the training"] > 0 for row in rows)
    assert rows[0]["measured"] != rows[1]["measured"]
    smooth.main()
    assert capsys.readouterr().out == ""  # both are there


@pytest.mark.slow
def test_other_libraries_get_rows(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("kronfluence")
    pytest.importorskip("trak")
    run(monkeypatch, tmp_path, TASK, "--only", "Random")
    monkeypatch.setattr(single, "main", peers.main)
    for library in ("dattri", "captum"):
        monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    board_rows = run(monkeypatch, tmp_path, TASK)
    assert "dattri, CG does not apply: ModuleNotFoundError" in capsys.readouterr().out
    for tasks in board_rows.values():
        rows, refused = tasks[TASK]["methods"], tasks[TASK]["refused"]
        assert "ModuleNotFoundError" in refused["captum, TracInCP"]
        assert "language models" in refused["bergson, EK-FAC"]
        assert set(rows) == {"Random", "kronfluence, EK-FAC", "traker, TRAK"}
        assert rows["kronfluence, EK-FAC"]["agreement"] > 0.99
        assert "empirical" in rows["kronfluence, EK-FAC"]["remake"]
