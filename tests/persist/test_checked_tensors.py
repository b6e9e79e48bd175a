"""Tensors on disk: what is altered is refused, and what earlier versions wrote can be read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import whence.methods
import whence.replay.sweep
from whence.errors import DamagedFile
from whence.persist.arrays import load_tensors, save_tensors, serialize
from whence.persist.cache import FactorCache
from whence.persist.files import Throttle
from whence.retrain.grid import Grid
from whence.retrain.unfinished import StackCheckpoint
from whence.run import Run


def tensors() -> dict[str, Tensor]:
    return {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b/c": torch.tensor([True, False]),
        "half": torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
    }


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[k], w) and found[k].dtype == w.dtype for k, w in wanted.items()
    )


def test_tensors_come_back_with_what_was_said_about_them(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, tensors(), {"step": 3, "place": Path("x"), "nested": {"k": [1.5]}})
    found, about = load_tensors(path)
    assert same(found, tensors())
    assert about == {"step": 3, "place": "x", "nested": {"k": [1.5]}}
    assert same(load_file(path), tensors())  # an ordinary safetensors file


def test_views_transposed_and_shared_tensors_are_written(tmp_path: Path) -> None:
    table = torch.arange(12.0).reshape(3, 4).requires_grad_()
    given = {"row": table[1], "column": table[:, 1], "t": table.T, "whole": table, "again": table}
    path = tmp_path / "a.safetensors"
    save_tensors(path, given, {})
    found, _ = load_tensors(path)
    assert same(found, {name: tensor.detach() for name, tensor in given.items()})
    assert serialize(given) == serialize(dict(reversed(given.items())))


def test_tensors_that_were_read_lie_in_memory_as_computed_ones_do(tmp_path: Path) -> None:
    """Products of tensors at odd addresses, as in the file, have other last bits."""
    path = tmp_path / "a.safetensors"
    save_tensors(path, {name: torch.randn(3) for name in ("a", "bb", "ccc")}, {})
    found, _ = load_tensors(path)
    assert [tensor.data_ptr() % 64 for tensor in found.values()] == [0, 0, 0]


@pytest.mark.parametrize("place", [-1, -5, -9])
def test_a_flipped_bit_is_noticed(tmp_path: Path, place: int) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"x": torch.arange(4.0)}, {})
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match=r"a\.safetensors is damaged \(altered.*\): do this$"):
        load_tensors(path, remedy="do this")
    with pytest.raises(DamagedFile, match="altered"):
        load_tensors(path, checksum_required=False)


@pytest.mark.parametrize("size", [0, 5, 40, -1])
def test_truncated_tensors_are_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, tensors(), {})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedFile, match=r"is damaged \(truncated, or not a safetensors file"):
        load_tensors(path)


def test_a_missing_file_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        load_tensors(tmp_path / "none.safetensors")
    assert not isinstance(raised.value, DamagedFile)


def test_a_missing_checksum_is_refused_unless_the_kind_of_file_had_none(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(tensors(), path)
    with pytest.raises(DamagedFile, match="no checksum"):
        load_tensors(path)
    assert same(load_tensors(path, checksum_required=False)[0], tensors())


# --- the factor cache -----------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_factor_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: bool) -> None:
    folder = tmp_path / "factors" if on_disk else None
    cache = FactorCache(folder)
    assert cache.get("k") is None and cache.snapshot("k") is None
    cache.offer_snapshot("k", tensors(), {"done": 1})
    assert cache.snapshot("k") is None  # too early
    monkeypatch.setattr(Throttle, "due", lambda _: True)
    cache.offer_snapshot("k", tensors(), {"done": 2})
    left = cache.snapshot("k")
    if on_disk:
        assert left is not None and same(left[0], tensors()) and left[1] == {"done": 2}
    else:
        assert left is None
    cache.put("k", tensors(), {"seed": 0})
    found = cache.get("k")
    assert found is not None and same(found, tensors()) and cache.snapshot("k") is None
    if folder is not None:
        assert [file.name for file in folder.iterdir()] == ["k.safetensors"]
        again = FactorCache(folder).get("k")
        assert again is not None and same(again, tensors())
    cache.drop("k")
    assert cache.get("k") is None


# --- files of earlier versions --------------------------------------------------------------------

# SHA-256 of tensors(), as the first version with a factor cache wrote it
SHA256 = "a85963dcc8bfd1758a218ebbdb385eb65c983ea71f475cd029d999275da26546"


def test_an_old_factor_cache(tmp_path: Path) -> None:
    for name, about in (("k", {"settings": {}}), ("k.partial", {"position": {"done": 3}})):
        text = json.dumps(about | {"sha256": SHA256})
        save_file(tensors(), tmp_path / f"{name}.safetensors", {"about": text})
    cache = FactorCache(tmp_path)
    found, left = cache.get("k"), cache.snapshot("k")
    assert found is not None and same(found, tensors())
    assert left is not None and same(left[0], tensors()) and left[1] == {"done": 3}


def test_an_old_unfinished_training(tmp_path: Path) -> None:
    content = {"weights/w": torch.ones(2, 2), "state/w/exp_avg": torch.zeros(2, 2)}
    save_file(content, tmp_path / "a.safetensors", {"stage": "1", "step": "12"})
    begun = StackCheckpoint.open(tmp_path / "a.safetensors")
    assert (begun.stage, begun.step) == (1, 12)
    assert same(begun.weights, {"w": torch.ones(2, 2)})
    assert same(begun.state, {"w/exp_avg": torch.zeros(2, 2)})


def test_an_old_sweep(tmp_path: Path) -> None:
    about = {"step": 5, "segment": 1, "magnitudes": [1.0, 2.0], "account": {"x": 1}}
    numbers = torch.arange(6.0, dtype=torch.float64).reshape(1, 2, 3)
    content = {"w/layer/x": torch.ones(2), "values": numbers, "here": numbers[0] + 1}
    path = tmp_path / "sweep.safetensors"
    save_file(content, path, {"key": "k", "about": json.dumps(about)})

    class Total:
        values: Any = None
        here: Any = None
        segment = 0
        magnitudes: Any = None

    total: Any = Total()
    snapshot = whence.replay.sweep.SweepSnapshot(path)
    assert snapshot.load("another", total) is None and total.values is None
    found = snapshot.load("k", total)
    assert found is not None
    step, adjoint, account = found
    assert step == 5 and account == {"x": 1} and total.segment == 1
    assert torch.equal(adjoint["layer/x"]["w"], torch.ones(2))
    assert (total.values == numbers.numpy()).all() and total.magnitudes == [1.0, 2.0]


def test_an_old_grid_of_trainings(tmp_path: Path) -> None:
    keys = ["00" * 32, "ab" * 32]
    trainings = torch.tensor([[0] * 32, [0xAB] * 32], dtype=torch.uint8)
    (tmp_path / "parts").mkdir()
    content = {"schema": 1, "identity": {"recipe": 1}, "notes": {"engine": "vmap"}}
    (tmp_path / "grid.json").write_text(json.dumps(content, indent=1))
    rows = torch.tensor([[1.0, 2.0], [3.0, float("nan")]], dtype=torch.float64)
    save_file({"measurements": rows, "trainings": trainings}, tmp_path / "parts/a.safetensors")
    grid = Grid(tmp_path, {"recipe": 1}, 2)
    assert len(grid) == 2 and grid.notes == {"engine": "vmap"}
    assert grid[keys[0]].tolist() == [1.0, 2.0] and np.isnan(grid[keys[1]][1])
    grid.add(["cd" * 32], np.array([[5.0, 6.0]]))
    assert Grid(tmp_path, {"recipe": 1}, 2)["cd" * 32].tolist() == [5.0, 6.0]


def test_a_grid_part_that_was_altered_is_refused(tmp_path: Path) -> None:
    grid = Grid(tmp_path, {}, 2)
    grid.add(["ab" * 32], np.array([[5.0, 6.0]]))
    (part,) = (tmp_path / "parts").glob("*.safetensors")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(DamagedFile, match="delete it, and rerun to repeat its trainings"):
        Grid(tmp_path, {}, 2)


def test_a_checkpoint_is_the_same_bytes_as_ever(tmp_path: Path) -> None:
    states = [{"a": tensors()["a"] + k} for k in (1, 2)]
    run = Run.from_checkpoints(states, [2, 4], 0.1, optimizer="sgd", momentum=0.9)
    saved = run.save(tmp_path / "run")
    path = saved.final.path
    assert path is not None
    save_file(states[1], tmp_path / "plain.safetensors")
    assert path.read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    content = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps(content, indent=1))  # as it was written
    assert Run.open(tmp_path / "run").fingerprint == run.fingerprint
