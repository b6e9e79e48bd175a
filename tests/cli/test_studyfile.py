"""Study files: Python, and YAML about Hugging Face folders."""

from __future__ import annotations

import ast
import csv
import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import transformers_models
from support.transformers_models import gpt2
from torch.utils.data import TensorDataset

import whence
from whence.cli import main
from whence.cli.studyfile import StudyFileError, load_study
from whence.documents import filled_up
from whence.integrations.study_yaml import KEYS

GOOD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import whence

data = TensorDataset(torch.zeros(6, 2), torch.arange(6) % 3)
model = nn.Linear(2, 3)
study = whence.Study(model, whence.Classification(), data,
                     whence.Run.from_checkpoints([model.state_dict()], [3], 0.1))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_good_one(here: Path) -> None:
    (here / "mine.py").write_text("WEIGHT = 3\n")
    (here / "study.py").write_text(
        "from mine import WEIGHT\n"  # what lies beside it is found
        + GOOD
        + "query = data\nclasses = ['a', 'b', 'c']\n"
        + "if __name__ == '__main__':\n    raise RuntimeError('is not run')\n"
    )
    file = load_study("study.py")
    assert isinstance(file.study, whence.Study) and isinstance(file.train, TensorDataset)
    assert file.query is file.train is file.query_data("data") is file.query_data(None)
    assert file.query_data("self") is None and file.shown == {"classes": ["a", "b", "c"]}
    assert file.recipe is None and file.names["WEIGHT"] == 3


def test_a_name_that_is_taken(here: Path) -> None:
    (here / "json.py").write_text(GOOD)
    assert isinstance(load_study("json.py").study, whence.Study)
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n\ny = x / 0\n", r"^study.py, line 3: ZeroDivisionError: division by zero$"),
        ("def f():\n    {}['a']\n\nf()\n", r"^study.py, line 2: KeyError: 'a'$"),
        ("x = = 1\n", r"study.py, line 1: SyntaxError: invalid syntax"),
        ("x = 1\n", r"^study.py defines no `study`: it needs a line study = whence.Study\("),
        (GOOD.replace("study =", "mine ="), r"defines no `study` \(rename 'mine'\)"),
        ("study = 3\n", r"^`study` in study.py has the type int: define a whence.Study$"),
        (GOOD + "recipe = 3\n", r"^`recipe` in study.py has the type int: define a whence.Recipe$"),
        ("import sys\nsys.exit(3)\n", r"line 2 ends the program \(exit code 3\): put .*__main__"),
        ("x = 1\0\n", r"^study.py: (SyntaxError|ValueError): .*null bytes"),
        ("from .data import x\n", r"relative import.* import its neighbours by name\)$"),
        ("raise BaseException\n", r"^study.py, line 1: BaseException$"),
        ("import nothing_there\n", r"line 1: ModuleNotFoundError: No module named 'nothing_there'"),
        (
            "import whence, torch\nstudy = whence.Study(torch.nn.Linear(1, 1), 3, [1], 'runs/x')\n",
            r"^study.py, line 2: there is no run at /.*/runs/x",
        ),
    ],
)
def test_one_that_is_wrong(here: Path, text: str, message: str) -> None:
    (here / "study.py").write_text(text)
    with pytest.raises(StudyFileError, match=message):
        load_study("study.py")


def test_names_that_are_used_for_something_else(here: Path) -> None:
    """They cost nothing but a line."""
    (here / "study.py").write_text(
        GOOD + "columns = 3\nclasses = {'cat': 0}\nrenderer = 'svg'\ntokenizer = str.split\n"
    )
    file = load_study("study.py")
    assert file.shown == {} and list(file.other) == ["classes", "columns", "renderer", "tokenizer"]
    why = "study.py: columns is a int: it must be a list of names to show examples; it is ignored"
    assert file.other["columns"] == why


def test_what_raises_beside_it_is_named(here: Path) -> None:
    (here / "broken_part.py").write_text("x = 1\nnothing\n")
    (here / "study.py").write_text("import broken_part\n")
    with pytest.raises(
        StudyFileError, match=r"^study.py, line 1 \(at .*broken_part.py, line 2\): N"
    ):
        load_study("study.py")


def test_paths_that_are_wrong(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "sub/study.py").write_text("import whence\nwhence.Study(None, None, None, 'runs/x')\n")
    (here / "notes.txt").write_text("")
    for path, message in (
        ("nowhere.py", "nowhere.py does not exist: give a study file"),
        ("sub", r"sub is a folder: give a study file, such as study.py \(in it: study.py\)"),
        ("notes.txt", "neither a .py nor a .yaml"),
        ("sub/study.py", f"there is no run at {here}/sub/runs/x"),
    ):
        with pytest.raises(StudyFileError, match=message):
            load_study(path)


def test_queries_and_recipes_that_are_missing(here: Path) -> None:
    (here / "study.py").write_text(GOOD)
    file = load_study("study.py")
    with pytest.raises(StudyFileError, match=r"defines no `query`: .* or use --query self"):
        file.query_data(None)
    with pytest.raises(StudyFileError, match=r"defines no 'x' for --query: it has data"):
        file.query_data("x")
    with pytest.raises(StudyFileError, match="defines no `recipe`, but this command needs"):
        file.needs_recipe()


# -- YAML ------------------------------------------------------------------------------------------

WORDS = [f"w{k}" for k in range(16)]
TEXTS = [" ".join(WORDS[(3 * k + j) % 16] for j in range(2 + k % 4)) for k in range(8)]


def tokenizer(folder: Path) -> Any:
    """One token for each word."""
    hf, tokenizers = import_module("transformers"), import_module("tokenizers")
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {word: k + 2 for k, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    return fast


def trained(folder: Path, make: Callable[[], Any], rows: list[dict[str, Any]]) -> None:
    """What a Trainer leaves."""
    hf = import_module("transformers")
    torch.manual_seed(0)
    args = hf.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=3,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = hf.Trainer(make(), args, train_dataset=rows, data_collator=filled_up)
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()


def bert() -> Any:
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    return transformers_models.bert(**names)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two trainings, and their data."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("left")
    fast = tokenizer(folder / "tokenizer")
    ids = [fast(text)["input_ids"] for text in TEXTS]
    masks = [[1] * len(i) for i in ids]
    rows = [
        {"input_ids": i, "attention_mask": m, "labels": i} for i, m in zip(ids, masks, strict=True)
    ]
    trained(folder / "lm", gpt2, rows)
    trained(folder / "classifier", bert, [row | {"labels": k % 2} for k, row in enumerate(rows)])
    (folder / "train.txt").write_text("\n".join(TEXTS) + "\n")
    (folder / "train.jsonl").write_text(
        "\n".join(json.dumps({"text": t, "label": k % 2}) for k, t in enumerate(TEXTS))
    )
    with (folder / "train.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerows(
            [("sentence", "class"), *((t, ("bad", "good")[k % 2]) for k, t in enumerate(TEXTS))]
        )
    return folder


def write(here: Path, left: Path, text: str) -> Path:
    (here / "study.yaml").write_text(text.replace("LEFT", str(left)))
    return here / "study.yaml"


LM = """
output_dir: LEFT/lm
task: causal-lm
tokenizer: LEFT/tokenizer
train: LEFT/train.txt
query: LEFT/train.jsonl
cache: factors
"""
CLASSIFIER = """
output_dir: LEFT/classifier
task: sequence-classification
tokenizer: LEFT/tokenizer
train: LEFT/train.csv
columns: {text: sentence, label: class}
measurement: loss
cache: factors
"""


@pytest.mark.filterwarnings("ignore")
def test_a_language_model_is_attributed(left: Path, here: Path) -> None:
    """The same scores as the study one would write by hand."""
    path = write(here, left, LM)
    assert main(["attribute", str(path), "--out", "scores", "--segments", "2"]) == 0
    hf = import_module("transformers")
    model = gpt2()
    fast = hf.AutoTokenizer.from_pretrained(str(left / "tokenizer"))
    rows = [fast(text)["input_ids"] for text in TEXTS]
    data = [{"input_ids": torch.tensor(r), "labels": torch.tensor(r)} for r in rows]

    def collate(batch: list[Any]) -> Any:
        longest = max(len(row["input_ids"]) for row in batch)
        put = lambda x, fill: torch.nn.functional.pad(x, (0, longest - len(x)), value=fill)  # noqa: E731
        return {
            "input_ids": torch.stack([put(row["input_ids"], 0) for row in batch]),
            "attention_mask": torch.stack(
                [put(torch.ones_like(row["input_ids"]), 0) for row in batch]
            ),
            "labels": torch.stack([put(row["labels"], -100) for row in batch]),
        }

    run = whence.Run.from_huggingface(left / "lm", model, size=8)
    study = whence.Study(model, whence.LanguageModeling(), data, run, collate=collate)
    expected = whence.Source(segments=2).attribute(study, data, progress=False)
    np.testing.assert_allclose(
        whence.Scores.load("scores").values, expected.values, rtol=1e-4, atol=1e-6
    )
    assert (here / "factors").is_dir()
    assert main(["top", "scores", "--query", "1", "--study", str(path)]) == 0
    assert main(["doctor", str(path)]) == 0


@pytest.mark.filterwarnings("ignore")
def test_a_classifier(left: Path, here: Path) -> None:
    file = load_study(write(here, left, CLASSIFIER))
    assert file.shown["classes"] == ["bad", "good"] and file.query is None
    assert [row["labels"] for row in file.train] == [k % 2 for k in range(8)]
    assert file.study.tasks["train"].measurement == "loss"
    batch = file.study.data["train"].take([0, 3])
    assert batch["input_ids"].shape == (2, 5) and batch["attention_mask"][0].sum() == 2
    queries = file.query_data(str(left / "train.csv"))
    scores = whence.TracIn().attribute(file.study, queries, progress=False)
    assert scores.shape == (8, 8)


@pytest.mark.filterwarnings("ignore")
def test_a_prompt_has_no_loss(left: Path, here: Path) -> None:
    rows = [{"q": "w1 w2 ", "a": "w3 w4 w5"}] * 8
    (here / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = LM.replace("LEFT/train.txt", "pairs.jsonl").replace("query: LEFT/train.jsonl\n", "")
    file = load_study(write(here, left, text + "columns: {text: a, prompt: q}\nmax_length: 4\n"))
    assert file.train[0]["labels"] == [-100, -100, 5, 6]
    assert file.train[0]["input_ids"] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("task:", "tusk:"),
            r"study.yaml: tusk is unknown \(did you mean task\?\): use output_dir",
        ),
        (("train: LEFT/train.txt\n", ""), r"lacks train: the training examples"),
        (
            ("causal-lm", "vision"),
            r"task 'vision' is not one of causal-lm, sequence-classification",
        ),
        (("LEFT/lm", "nowhere"), r"output_dir nowhere does not exist: give a folder, relative to"),
        (("LEFT/lm", "LEFT/tokenizer"), "has no checkpoint-\\* folders"),
        (("tokenizer: LEFT/tokenizer\n", ""), "no tokenizer in .*name its folder as tokenizer:"),
        (("LEFT/train.txt", "nowhere.txt"), "train nowhere.txt does not exist"),
        (("LEFT/train.txt", "study.yaml"), r"is none of .jsonl, .csv, .txt"),
        (("LEFT/train.txt", "bad.jsonl"), "bad.jsonl, line 2: "),
        (("LEFT/train.txt", "empty.txt"), "empty.txt is empty"),
        (("LEFT/train.txt", "LEFT/train.csv"), "line 2: no column 'text' .it has sentence, class"),
        (
            ("causal-lm", "causal-lm\ncolumns: {txt: a}"),
            r"columns: txt is unknown .did you mean text",
        ),
        (
            ("causal-lm", "causal-lm\nlayers: 3"),
            "layers must be text or a list, not 3: patterns of",
        ),
        (("LEFT/train.txt", "[a, b]"), r"train must be text, not \['a', 'b'\]: the training"),
        (("causal-lm", "causal-lm\nmax_length: 0"), "max_length 0 leaves no tokens"),
        (("causal-lm", "causal-lm\ncolumns: {text: [a]}"), "columns must map to names"),
        (("causal-lm", "causal-lm\nclasses: [a]"), "causal-lm has no classes: remove them"),
        (("LEFT/train.txt", "latin.txt"), "latin.txt is not encoded in UTF-8"),
        (("LEFT/train.txt", "number.jsonl"), "line 1: column 'text' holds 5, which is not text"),
        (("causal-lm", "causal-lm\nmeasurement: margin"), "measurement='margin'"),
        (("output_dir", "- output_dir"), "is not valid YAML|is not a mapping"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_yaml_that_is_wrong(
    left: Path,
    here: Path,
    change: tuple[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (here / "bad.jsonl").write_text('{"text": "w1 w2"}\n{"text": \n')
    (here / "empty.txt").write_text("\n")
    (here / "latin.txt").write_bytes(b"w\xe9\n")
    (here / "number.jsonl").write_text('{"text": 5}\n')
    path = write(here, left, LM.replace(*change))
    assert main(["layers", path.name]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert re.search(message, said), said


def test_paths_in_a_yaml_are_relative_to_it(
    left: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(here, left, LM)
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert load_study(path).study.cache == here.resolve() / "factors"


def test_every_key_of_a_yaml_is_used() -> None:
    source = Path(import_module("whence.integrations.study_yaml").__file__ or "").read_text()
    after = source.split("\ndef read_study_yaml", 1)[1]
    assert all(f'"{key}"' in after for key in KEYS)


# -- whence init -----------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(40, 4)
y = (x[:, 0] > 0).long()
train_set, test_set = TensorDataset(x[:30], y[:30]), TensorDataset(x[30:], y[30:])
EPOCHS = 3

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))

def main():
    model = Net()
    loader = DataLoader(train_set, batch_size=10, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    raise SystemExit("must not run")

if __name__ == "__main__":
    main()
"""


def test_init_from_a_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "my_script.py").write_text(SCRIPT)
    assert main(["init", "my_script.py"]) == 0
    assert "marked with EDIT. Then check it: whence doctor study.py" in capsys.readouterr().out
    file = load_study("study.py")
    assert file.recipe is not None and file.query is not None
    (stage,) = file.recipe.stages
    assert (stage.batch_size, stage.epochs) == (10, 3)
    assert file.study.runs[0].steps == 9 and file.study.runs[0].optimizer == "sgd"
    assert main(["init", "my_script.py"]) == 2  # it replaces nothing
    assert "study.py exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loss", "task"),
    [
        ("nn.functional.mse_loss(model(a), b)", "Regression()"),
        ("nn.CrossEntropyLoss()(model(a), b)", "Classification()"),
        ("my_loss(model(a), b)", "Classification()  # EDIT: or Regression(), LanguageModeling()"),
    ],
)
def test_init_reads_the_loss_and_the_epochs_of_a_loop(here: Path, loss: str, task: str) -> None:
    (here / "my_script.py").write_text(
        f"for epoch in range(7):\n    for a, b in loader:\n        {loss}.backward()\n"
    )
    assert main(["init", "my_script.py"]) == 0
    lines = (here / "study.py").read_text().splitlines()
    assert f"task = whence.{task}" in lines and "    epochs=7," in lines


@pytest.mark.parametrize("recorder", ["whence.Recorder", "RecorderCallback"])
def test_init_uses_the_run_that_a_script_records(here: Path, recorder: str) -> None:
    (here / "my_script.py").write_text(
        f'recorder = {recorder}("runs/my \\"run", model, optimizer)\n'
    )
    assert main(["init", "my_script.py"]) == 0
    text = (here / "study.py").read_text()
    (study,) = (node for node in ast.parse(text).body if ast.unparse(node).startswith("study ="))
    assert isinstance(study, ast.Assign) and isinstance(study.value, ast.Call)
    (runs,) = (k.value for k in study.value.keywords if k.arg == "runs")
    assert ast.literal_eval(runs) == 'runs/my "run'


def test_a_file_that_init_left_incomplete_says_which_lines(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "my_script.py").write_text("optimizer = torch.optim.SGD(parameters, lr=0.1)\n")
    assert main(["init", "my_script.py"]) == 0
    capsys.readouterr()
    assert main(["doctor", "study.py"]) == 2
    assert capsys.readouterr().err == (
        "whence: study.py is not complete: replace the ... in lines 6, 7, 8\n"
    )


def test_init_from_a_lightning_checkpoint(here: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    groups = [{"lr": 0.25, "momentum": 0.9, "weight_decay": 0.01, "params": [0, 1, 2, 3]}]
    optimizers = [{"state": {}, "param_groups": groups}]
    torch.save({"state_dict": state, "global_step": 7, "optimizer_states": optimizers}, "a.ckpt")
    assert main(["init", "a.ckpt"]) == 0
    text = (here / "study.py").read_text()
    make = "torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))"
    data = "torch.utils.data.TensorDataset(torch.randn(8, 2), torch.arange(8) % 2)"
    for name, value in {"model": make, "train": data, "query": data}.items():
        text = text.replace(f"{name} = ...", f"{name} = {value}")
    (here / "study.py").write_text(text)
    study = load_study("study.py").study
    assert study.runs[0].steps == 7 and study.runs[0].learning_rates[-1, 0] == 0.25
    scores = whence.TracIn().attribute(study, study.train["train"], progress=False)
    assert scores.shape == (8, 8)


def test_init_from_a_trainers_folder(left: Path, here: Path) -> None:
    (here / "train.txt").write_text((left / "train.txt").read_text())
    (here / "test.txt").write_text((left / "train.txt").read_text())
    assert main(["init", str(left / "lm")]) == 0
    text = (here / "study.yaml").read_text()
    (here / "study.yaml").write_text(text + f"tokenizer: {left / 'tokenizer'}\n")
    file = load_study(here / "study.yaml")
    assert "EDIT" not in text and len(file.query_data(None)) == len(file.study.train["train"])
    assert isinstance(file.study.tasks["train"], whence.LanguageModeling)


def test_init_refuses_what_it_does_not_know(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "empty").mkdir()
    (here / "x.txt").write_text("")
    (here / "bad.py").write_text("def (:")
    for source, message in (
        ("nowhere", "does not exist"),
        ("empty", "has no checkpoint-* folders"),
        ("x.txt", "neither a folder"),
        ("bad.py", "bad.py, line 1"),
    ):
        assert main(["init", source]) == 2
        assert message in capsys.readouterr().err
