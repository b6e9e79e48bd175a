"""Texts, names and arrays that nobody expects: one clear message, or shown harmlessly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence
from whence.cli import main
from whence.data import batch_length
from whence.evaluate import plots
from whence.retrain import Truth
from whence.run import Run
from whence.scores import Scores
from whence.table import Table, escaped, one_line

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
HOSTILE = [
    "[/bold]",
    "[red]x",
    "$x_$^",
    "a\ud800",
    "\x1b]0;title\x07",
    "\x9b31m",
    "a\nb\tc",
    "\u202eabc",
    "\x00",
    "",
]


def record(path: Path, **options: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whence.Recorder(path, model, optimizer, checkpoints=1, total_steps=2, **options):
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X), Y).backward()
            optimizer.step()
    return Run.open(path)


# --- batches --------------------------------------------------------------------------------------


class Texts(nn.Module):
    """Takes a text, which it does not need, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, text: Any, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class OfTexts(whence.Classification):
    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return model(*batch[:-1])  # type: ignore[no-any-return]


def test_a_batch_whose_first_field_is_text(tmp_path: Path) -> None:
    run = record(tmp_path)
    rows = [("some text", x, int(y)) for x, y in zip(X, Y, strict=True)]
    found, wanted = (
        whence.TracIn().attribute(whence.Study(model, task, data, each), data, progress=False)
        for model, task, data, each in (
            (Texts(), OfTexts(), rows, _renamed(run)),
            (nn.Linear(4, 3), whence.Classification(), TensorDataset(X, Y), run),
        )
    )
    np.testing.assert_array_equal(found.values, wanted.values)


def _renamed(run: Run) -> Run:
    states = [{f"layer.{k}": v for k, v in c.weights().items()} for c in run.checkpoints]
    return Run.from_checkpoints(states, [c.step for c in run.checkpoints], 0.1, optimizer="sgd")


@pytest.mark.parametrize(
    "batch", ["text", ["a", "b"], {}, [], {"a": ["x"], "b": "y"}, (torch.tensor(1.0),), None, b"x"]
)
def test_a_batch_without_tensors_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match="has no tensor with an entry for each example") as raised:
        batch_length(batch)
    assert isinstance(raised.value, whence.WhenceError)


def test_the_length_of_a_batch() -> None:
    assert batch_length(("text", [["a"], torch.zeros(7, 2)], torch.zeros(3))) == 7
    assert batch_length({"text": ["a"] * 5, "x": torch.zeros(5)}) == 5


def test_complex_numbers(tmp_path: Path) -> None:
    run = record(tmp_path)
    complex_x = torch.complex(X, X)
    with pytest.raises(ValueError, match="parameter weight is torch") as raised:
        whence.Study(
            nn.Linear(4, 3, dtype=torch.complex64),
            whence.Classification(),
            TensorDataset(complex_x, Y),
            run,
        )
    assert isinstance(raised.value, whence.WhenceError)
    study = whence.Study(nn.Linear(4, 3), whence.Classification(), TensorDataset(X, Y), run)
    with pytest.raises(ValueError, match=r"query batches are built like \['complex', 'integer'\]"):
        whence.TracIn().attribute(study, TensorDataset(complex_x, Y), progress=False)


class OfRealParts(whence.Classification):
    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0].real)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_complex_inputs_have_the_precision_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    run = record(tmp_path)
    found, wanted = (
        whence.TracIn().attribute(
            whence.Study(nn.Linear(4, 3), task, data, run), data, dtype=dtype, progress=False
        )
        for task, data in (
            (OfRealParts(), TensorDataset(torch.complex(X, X), Y)),
            (whence.Classification(), TensorDataset(X, Y)),
        )
    )
    np.testing.assert_array_equal(found.values, wanted.values)


COLLATES: dict[str, tuple[Callable[..., Any], str]] = {
    "sparse": (lambda x, y: (x.to_sparse(), y), "that is sparse"),
    "compressed": (lambda x, y: (x.to_sparse_csr(), y), "that is sparse"),
    "nested": (lambda x, y: (torch.nested.nested_tensor(list(x)), y), "that is nested"),
    "quantized": (
        lambda x, y: (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), y),
        "that is quantized",
    ),
    "meta": (lambda x, y: (x.to("meta"), y), "that is on the meta device"),
    "complex": (lambda x, y: (x + 1j, y), "the model or the task failed on train example 0, 1"),
    "array": (lambda x, y: (x.numpy(), y), "must be Tensor, not numpy.ndarray"),
    "none": (lambda x, y: None, "must be Tensor, not NoneType"),
    "failing": (lambda x, y: 1 / 0, "its collate function failed on train example 0: ZeroDiv"),
    "too wide": (lambda x, y: (torch.cat([x, x], 1), y), "RuntimeError: mat1 and mat2 shapes"),
}


@pytest.mark.parametrize("name", COLLATES)
def test_batches_that_a_model_cannot_take(tmp_path: Path, name: str) -> None:
    make, message = COLLATES[name]
    rows = list(TensorDataset(X, Y))
    study = whence.Study(
        nn.Linear(4, 3),
        whence.Classification(),
        rows,
        record(tmp_path),
        collate=lambda examples: make(*map(torch.stack, zip(*examples, strict=True))),
    )
    with pytest.raises(whence.WhenceError, match=message):
        whence.TracIn().attribute(study, rows, progress=False)


def test_examples_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    class Broken(list[Any]):
        def __getitem__(self, k: Any) -> Any:
            if k == 7:
                raise OSError("the disk is gone")
            return super().__getitem__(k)

    run = record(tmp_path)
    study = whence.Study(nn.Linear(4, 3), whence.Classification(), Broken(TensorDataset(X, Y)), run)
    with pytest.raises(whence.WhenceError, match="failed on train example 7: OSError") as raised:
        whence.TracIn().attribute(study, TensorDataset(X, Y), progress=False)
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("nothing", [None, object()])
def test_examples_that_torch_cannot_collate(tmp_path: Path, nothing: Any) -> None:
    rows = [(x, nothing) for x in X]
    study = whence.Study(nn.Linear(4, 3), whence.Classification(), rows, record(tmp_path))
    with pytest.raises(TypeError, match="torch cannot collate") as raised:
        whence.TracIn().attribute(study, rows, progress=False)
    assert isinstance(raised.value, whence.WhenceError)


def test_numbers_that_are_too_large_to_be_squared(tmp_path: Path) -> None:
    data = TensorDataset(1e25 * X, Y)
    study = whence.Study(nn.Linear(4, 3), whence.Classification(), data, record(tmp_path))
    with pytest.raises(whence.errors.NotFinite):
        whence.Influence.published(1e-3).attribute(study, data, progress=False)


# --- subsets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        ([-1, 0, 1], "subset names example -1"),
        ([0.5, 1.5], "subset is float64"),
        ([], "subset is empty"),
        ([1, 1], "names an example twice"),
        ([[0, 1]], r"of shape \(1, 2\)"),
        (["a"], "subset is <U1"),
        ([1j], "subset is complex128"),
        ([float("nan")], "subset is float64"),
        (np.zeros(12, bool), "subset is empty"),
        ([2**70], "subset is object"),
    ],
)
def test_subsets_that_make_no_sense(tmp_path: Path, subset: Any, message: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: record(tmp_path, subset=subset),
        lambda: Run.from_checkpoints([nn.Linear(4, 3).state_dict()], [1], 0.1, subset=subset),
    ]
    for call in calls:
        with pytest.raises((ValueError, TypeError), match=message) as raised:
            call()
        assert isinstance(raised.value, whence.WhenceError)


def test_a_mask_is_the_examples_it_marks(tmp_path: Path) -> None:
    run = record(tmp_path, subset=np.arange(12) % 3 == 1)
    assert run.subset is not None and run.subset.tolist() == [1, 4, 7, 10]


# --- names ----------------------------------------------------------------------------------------


def scores(name: str) -> Scores:
    values = np.random.default_rng(0).standard_normal((3, 12)).astype(np.float32)
    stage = [name] * 6 + ["other"] * 6
    kind: dict[str, Any] = {"measurement": name, "unit": name, "higher_is_better": True}
    notes = {"warnings": [name]}
    return Scores(values, method=name, stage=stage, settings={"x": name}, diagnostics=notes, **kind)


def harmless(text: str) -> bool:
    text.encode()
    return all(c.isprintable() or c in "\n\t" for c in text)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_in_a_terminal(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    scores(name).save(tmp_path / "s")
    loaded = Scores.load(tmp_path / "s")
    assert loaded.method == name and loaded.stage is not None and loaded.stage[0] == name
    assert harmless(repr(loaded)) and harmless(repr(loaded.helpful(0)))
    assert len(repr(loaded.helpful(0)).splitlines()) == 11
    for arguments in ("", "--json"):
        code = main(["top", str(tmp_path / "s"), "--query", "0", *arguments.split()])
        out, err = capfd.readouterr()
        assert code == 0 and harmless(out) and harmless(err), err
        if arguments:
            assert json.loads(out)["helpful"][0]["stage"] in (name, "other")
        elif name.startswith("["):
            assert name in out
    (tmp_path / "s" / "scores.json").write_text(json.dumps({"schema": name}))
    code = main(["top", str(tmp_path / "s"), "--query", "0"])
    out, err = capfd.readouterr()
    assert code == 2 and harmless(out + err)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_on_a_page(tmp_path: Path, name: str) -> None:
    train = [(f"{name} {k}", k % 3) for k in range(12)]
    path = scores(name).report(tmp_path / "a.html", title=name, check=False, query=train[:3])
    path.read_text("utf-8")


@pytest.mark.parametrize("name", HOSTILE)
def test_names_in_a_figure(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    truth = Truth(rng.random((12, 12)) < 0.5, rng.standard_normal((12, 2, 3)))
    both = {
        name: Scores(
            scores("m").values,
            method="m",
            measurement="measurement",
            unit="",
            higher_is_better=True,
        )
    }
    compared = whence.evaluate.compare(both, truth, bootstrap=100)
    plots.plot_lds(dict(compared), path=tmp_path / "a.png")
    assert harmless(repr(compared))


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_stages(tmp_path: Path, name: str) -> None:
    run = record(tmp_path, stage=name)
    assert [s.name for s in run.stages] == [name] and harmless(repr(run))
    study = whence.Study(nn.Linear(4, 3), whence.Classification(), TensorDataset(X, Y), run)
    found = whence.TracIn().attribute(
        study, TensorDataset(X, Y), out=tmp_path / "s", progress=False
    )
    assert found.shape == (12, 12)


def test_what_is_escaped() -> None:
    assert escaped("a\x1b[31m é 漢 😀\n\t") == "a\\u001b[31m é 漢 😀\n\t"
    assert escaped("\u206d\u200d\u2006") == "\\u206d\u200d\u2006"  # forms; joiners and spaces stay
    assert escaped("\ud83d") == "\\ud83d" and one_line("a\nb") == "a\\nb"
    assert "\\u0007" in str(Table(["a"], [["\x07"]], title="\x07")) and "\x07" not in str(
        Table(["a"], [["\x07"]])
    )


PATHS = ["a" * 300, "/".join(["a" * 200] * 30), "a\0b", "\ud800", "", 5, True, b"runs", None]


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_nothing_can_have(tmp_path: Path, path: Any) -> None:
    run = record(tmp_path / "run")
    given = tmp_path / path if isinstance(path, str) and path else path
    data, task = TensorDataset(X, Y), whence.Classification()
    study = whence.Study(nn.Linear(4, 3), task, data, run)
    scores = whence.TracIn().attribute(study, data, progress=False)
    calls: list[Callable[[], Any]] = [
        lambda: record(given),
        lambda: Run.open(given),
        lambda: Scores.load(given),
        lambda: Truth.load(given),
        lambda: whence.GradientStore.open(given, study),
        lambda: whence.GradientStore.build(study, given, progress=False),
        lambda: scores.save(given),
        lambda: scores.report(given),
        lambda: run.save(given),
    ]
    if path is not None:  # which is no folder
        calls.append(lambda: whence.TracIn().attribute(study, data, out=given, progress=False))
        calls.append(lambda: whence.Study(study.model, task, data, run, cache=given))
    for call in calls:
        with pytest.raises(whence.WhenceError, match=r"not a path|cannot be the name"):
            call()


def test_a_name_as_long_as_can_be(tmp_path: Path) -> None:
    """A temporary name must not be longer."""
    run, data = record(tmp_path), TensorDataset(X, Y)
    study = whence.Study(nn.Linear(4, 3), whence.Classification(), data, run)
    scores = whence.TracIn().attribute(study, data, progress=False)
    for name in ("a" * 250 + ".html", "漢" * 83 + ".html"):
        assert scores.report(tmp_path / name).exists()
