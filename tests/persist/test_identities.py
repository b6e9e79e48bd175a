"""Digests never change: caches, runs and results on disk are compared with them.

The values were computed before the digests moved into `whence.persist`.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_checked_tensors import SHA256, tensors
from torch import nn
from torch.utils.data import TensorDataset

from whence.data import Batches
from whence.persist import identity
from whence.persist.arrays import serialize
from whence.persist.identity import (
    digest,
    file_sha256,
    key_of,
    setting_sha256,
    sha256_of,
    tensors_sha256,
)
from whence.retrain.grid import name_of
from whence.run import Run
from whence.run.checkpoint import architecture_sha256, parameters_sha256, weights_sha256


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.25))
    with torch.no_grad():
        for k, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + k)
    return net


def run() -> Run:
    states = [{"a": tensors()["a"] + k} for k in (1, 2)]
    return Run.from_checkpoints(states, [2, 4], 0.1, optimizer="sgd", momentum=0.9)


def data() -> Batches:
    return Batches("train", TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5)))


SETTINGS = {"seed": 3, "layers": ["a", "b"], "path": Path("x"), "nested": {"z": 1.5, "a": None}}
NESTED = [
    tensors(),
    np.arange(4).reshape(2, 2),
    (1, "two", None),
    torch.arange(12).reshape(3, 4)[:, 1],
]

KNOWN: dict[str, tuple[Any, str]] = {
    "key_of": (lambda: key_of(SETTINGS), "c3ee9e5a4cee2ebdcbf3ca0b9f2559a5"),
    "tensors": (lambda: tensors_sha256(tensors()), SHA256),
    "serialize": (
        lambda: sha256_of(serialize(tensors())),
        "934aabe8e9aabbca23f718d27186570b00c5d21f5e899bb4d799c0011bf80c8f",
    ),
    "weights": (
        lambda: weights_sha256(model()),
        "3cf4c77c0e095408817d59a311614a1db2cfded6162766e3aaf9cf70a3296810",
    ),
    "parameters": (
        lambda: parameters_sha256(model()),
        "8728014b54d22279ab1118ee4d1024cd51cd3d6874eaf96b4be15ee753fb8942",
    ),
    "architecture": (
        lambda: architecture_sha256(model()),
        "22485bbfe420a9e3ddadaaeb2ebc6cf2a227cbaf53519e5d4d7761da5799e33e",
    ),
    "trainings": (lambda: name_of(["ab12", "cd34"]), "034941017c353b1e5e89c7c3"),
    "digest": (
        lambda: digest(NESTED),
        "c7ded107e769007ef48899ce80a563b013cdb58af4817d4028333d2c3a25d5e9",
    ),
    "data": (
        lambda: data().fingerprint(),
        "2c4916e95f025689c249893f53b270b0bb27cd9a0b36c81201f35afa00f10e88",
    ),
    "run": (
        lambda: run().fingerprint,
        "35567bb005f44f8be432e2c19f1e58fc5a9bd8bec5bbd00b0c4481e5e19d2893",
    ),
    "checkpoint": (
        lambda: run().final.sha256,
        "35ee415a8fb262711619b706f86b3e118d63a1660f2ae6e43b2aeb6aee4e35cd",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_digests_are_what_they_always_were(name: str) -> None:
    compute, known = KNOWN[name]
    assert compute() == known


def test_a_digest_is_of_the_bytes_one_after_another(tmp_path: Path) -> None:
    row = torch.arange(12, dtype=torch.int32).reshape(3, 4)[1:2, 2:3]  # contiguous, strides (4, 1)
    array = np.arange(6, dtype=np.int16).reshape(2, 3).T
    whole = b"ab" + b"c" + row.numpy().tobytes() + array.tobytes()
    assert sha256_of("ab", b"c", row, array) == sha256_of(whole)
    (tmp_path / "file").write_bytes(whole)
    assert file_sha256(tmp_path / "file") == sha256_of(whole)


def test_a_digest_counts_dtype_shape_names_and_values() -> None:
    base = torch.zeros(2, 3)
    others = [base.double(), base.reshape(3, 2), base + 1, {"a": base}, {"b": base}, [base], "x", 1]
    assert len({digest(value) for value in (base, *others)}) == 1 + len(others)
    strided = torch.arange(12.0).reshape(3, 4)[:, :1]
    assert digest(strided) == digest(strided.clone(memory_format=torch.contiguous_format))


def test_keys_of_another_type_are_other_keys() -> None:
    ones: list[Any] = [1, "1", 1.5, "1.5", True, "True", None, "None", (1,), "(1,)", b"1", "b'1'"]
    assert len({digest({key: 0}) for key in ones}) == len(ones)
    assert digest({1: 0, "1": 1}) != digest({1: 1, "1": 0})


def test_a_key_does_not_depend_on_the_order_of_the_settings() -> None:
    assert key_of(dict(reversed(SETTINGS.items()))) == key_of(SETTINGS)
    assert key_of(SETTINGS | {"seed": 4}) != key_of(SETTINGS)


def in_parts(last: float) -> dict[str, Any]:
    table = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, last]])
    return {
        "sparse": table.to_sparse(),
        "compressed": table.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([table[0], table[1, 1:]]),
        "quantized": torch.quantize_per_tensor(table, 0.5, 0, torch.qint8),
    }


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_consist_of_others_count_by_their_content() -> None:
    one, same, other = in_parts(3.0), in_parts(3.0), in_parts(4.0)
    for name in one:
        assert digest([one[name]]) == digest([same[name]]), name
        assert digest([one[name]]) != digest([other[name]]), name


@pytest.mark.parametrize("place", ["site-packages", "target", "editable", "program"])
def test_installed_packages_count_by_version(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they are: in a user's folder, below a virtual environment, on PYTHONPATH."""
    code, about = tmp_path / place, tmp_path / ("elsewhere" if place == "editable" else place)
    package, info = code / "some_package", about / "some_package-1.0.dist-info"
    package.mkdir(parents=True)
    if place != "program":
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
        (info / "top_level.txt").write_text("some_package\n")
    for folder in {code, about}:
        monkeypatch.syspath_prepend(folder)

    def imported(body: str) -> str:
        (package / "__init__.py").write_text(f"__version__ = '1.0'\ndef f(x): return {body}\n")
        monkeypatch.delitem(sys.modules, "some_package", raising=False)
        importlib.invalidate_caches()
        identity._version.cache_clear()
        function: Any = importlib.import_module("some_package").f
        return setting_sha256(function)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    one, other = imported("x"), imported("x + 1")
    monkeypatch.delitem(sys.modules, "some_package")
    identity._version.cache_clear()
    assert (one == other) == (place in ("site-packages", "target"))
