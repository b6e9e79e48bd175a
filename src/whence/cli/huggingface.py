"""A study out of a YAML: the folder that a Trainer left, a tokenizer, and files of examples.

    output_dir: out                    # with its checkpoint-* folders
    task: causal-lm                    # or sequence-classification
    train: train.jsonl                 # .jsonl, .csv, or .txt with an example on each line
    query: questions.jsonl

Nothing is fetched from the network, and nothing is unpickled.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from whence.cli.studyfile import StudyFile, StudyFileError

Lines = Iterator[tuple[int, Any]]  # numbered; a row, or the JSON of one
IGNORED = -100  # positions without a loss
COLUMNS = {"text": "text", "text_pair": None, "prompt": None, "label": "label"}
#: what may stand in the file, and what it is about
KEYS = {
    "output_dir": "the Trainer's output_dir, with checkpoint-* folders",
    "task": "causal-lm or sequence-classification",
    "train": "the training examples, as the Trainer saw them: .jsonl, .csv or .txt",
    "query": "the queries, a file like it",
    "model": "a folder with config.json (default: the last checkpoint)",
    "tokenizer": "a folder with a tokenizer (default: the last checkpoint, then output_dir)",
    "columns": "names of the columns {text, text_pair, prompt, label}",
    "max_length": "tokens that are kept of an example",
    "measurement": "what is measured: as in whence.Classification and LanguageModeling",
    "reduction": "causal-lm: mean or sum over an example's tokens",
    "layers": "patterns of the layers to track",
    "cache": "folder for fitted factors (default: output_dir/factors)",
    "classes": "names of the classes (default: the model's)",
    "notes": "what is known of the training, such as {clip_norm: 1.0}",
}
NEEDED = ("output_dir", "task", "train")
#: what a value must be; text where nothing is said
KINDS: dict[str, tuple[type, ...]] = {
    "columns": (dict,),
    "max_length": (int,),
    "layers": (str, list),
    "classes": (list, dict),
    "notes": (dict,),
}
IN_WORDS = {str: "text", int: "a number", list: "a list", dict: "names with values"}
TASKS = {
    "causal-lm": ("AutoModelForCausalLM", "LanguageModeling"),
    "sequence-classification": ("AutoModelForSequenceClassification", "Classification"),
}


def from_yaml(path: Path) -> StudyFile:
    """The study that a YAML describes."""
    given = _read(path)
    transformers = _needed("transformers", "huggingface")
    import whence

    auto, task_name = TASKS[given["task"]]
    output_dir = _folder(path, "output_dir", given["output_dir"])
    last = _last_checkpoint(output_dir)
    home = _folder(path, "model", given["model"]) if "model" in given else last
    if not (home / "config.json").is_file():
        adapter = (home / "adapter_config.json").is_file()
        raise StudyFileError(
            f"{path}: {home} has no config.json"
            + (", but a PEFT adapter: write a study.py that makes the model" * adapter)
            + (": name a folder that has, as model:" * (not adapter))
        )
    config = transformers.AutoConfig.from_pretrained(str(home), local_files_only=True)
    model = getattr(transformers, auto).from_config(config).float()
    tokenizer = _tokenizer(path, given, [last, output_dir, home])
    encode = Encoder(
        tokenizer,
        given["task"] == "causal-lm",
        COLUMNS | given.get("columns", {}),
        given.get("max_length"),
        config,
    )
    rows = partial(_rows, encode)
    train = rows(path, "train", given["train"])
    settings = {k: given[k] for k in ("measurement", "reduction") if k in given}
    try:
        task = getattr(whence, task_name)(**settings)
    except TypeError as error:
        raise StudyFileError(f"{path}: {given['task']} has no reduction ({error})") from error
    study = whence.Study(
        model,
        task,
        train,
        whence.Run.from_huggingface(output_dir, model, size=len(train), notes=given.get("notes")),
        collate=partial(padded, pad=tokenizer.pad_token_id or 0),
        cache=given.get("cache", output_dir / "factors"),
        layers=given.get("layers"),
    )
    shown: dict[str, Any] = {"tokenizer": tokenizer}
    if given["task"] != "causal-lm":
        names = getattr(config, "id2label", {})
        shown["classes"] = given.get("classes", [names[k] for k in sorted(names)])
    return StudyFile(
        path,
        study,
        rows(path, "query", given["query"]) if "query" in given else None,
        shown=shown,
        queries=lambda file: rows(path, "--query", file),
    )


@dataclass(frozen=True)
class Encoder:
    """Makes a row of a file into what the model takes."""

    tokenizer: Any
    language: bool
    columns: Mapping[str, str | None]
    max_length: int | None
    config: Any

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        text, pair, prompt = (self._text(row, what) for what in ("text", "text_pair", "prompt"))
        cut: dict[str, Any] = {
            "truncation": self.max_length is not None,
            "max_length": self.max_length,
        }
        if prompt is not None:
            text = prompt + text
        if self.language:
            cut["return_offsets_mapping"] = self.tokenizer.is_fast
        made = {k: list(v) for k, v in self.tokenizer(text, pair, **cut).items()}
        if not made["input_ids"]:
            raise ValueError(f"{text!r} has no tokens")
        if not self.language:
            return made | {"labels": self._label(self._of(row, "label"))}
        offsets = made.pop("offset_mapping", None)
        told = 0 if prompt is None else _told(offsets, len(prompt))
        return made | {"labels": [IGNORED] * told + made["input_ids"][told:]}

    def _text(self, row: Mapping[str, Any], what: str) -> Any:
        found = self._of(row, what)
        if self.columns[what] is not None and not isinstance(found, str):
            raise ValueError(f"column {self.columns[what]!r} holds {found!r}, which is no text")
        return found

    def _of(self, row: Mapping[str, Any], what: str) -> Any:
        column = self.columns[what]
        if column is None:
            return None
        if not isinstance(row, Mapping):
            raise ValueError(f"{row!r} is no row: give {{{column!r}: ...}}")
        if column not in row:
            raise ValueError(
                f"no column {column!r} (it has {', '.join(map(str, row))}): name the column of "
                f"the {what} as columns: {{{what}: ...}}"
            )
        return row[column]

    def _label(self, label: Any) -> int:
        names = {str(name): k for k, name in getattr(self.config, "id2label", {}).items()}
        if str(label) in names:
            return int(names[str(label)])
        try:
            number = int(label)
        except (TypeError, ValueError):
            known = ", ".join(names)
            raise ValueError(f"label {label!r} is no number and no class ({known})") from None
        if not 0 <= number < max(2, self.config.num_labels):
            raise ValueError(f"label {number}, but the model has {self.config.num_labels} classes")
        return number


def _told(offsets: list[tuple[int, int]] | None, length: int) -> int:
    """How many tokens, from the left, are of a prompt of so many characters."""
    if offsets is None:
        raise ValueError("telling prompt from answer needs a fast tokenizer (tokenizer.json)")
    return next((k for k, (_, end) in enumerate(offsets) if end > length), len(offsets))


def padded(rows: Sequence[Mapping[str, Any]], pad: int) -> dict[str, Any]:
    """A batch of encoded rows, padded on the right to the longest."""
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": pad, "labels": IGNORED}
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], list):
            values = [v + [fill.get(name, 0)] * (longest - len(v)) for v in values]
        batch[name] = torch.tensor(values)
    return batch


def _read(path: Path) -> dict[str, Any]:
    yaml = _needed("yaml", "cli")
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StudyFileError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(given, dict):
        raise StudyFileError(f"{path} is no list of settings: it needs {_listed(NEEDED)}")
    _known(path, "", given, KEYS)
    given = {key: value for key, value in given.items() if value is not None}  # "query:" alone
    for key, value in given.items():
        kinds = KINDS.get(key, (str,))
        if not isinstance(value, kinds) or isinstance(value, bool):
            meant = " or ".join(IN_WORDS[kind] for kind in kinds)
            raise StudyFileError(f"{path}: {key} must be {meant}, not {value!r}: {KEYS[key]}")
    missing = [key for key in NEEDED if key not in given]
    if missing:
        raise StudyFileError(f"{path} lacks {_listed(missing)}")
    if given["task"] not in TASKS:
        raise StudyFileError(f"{path}: task {given['task']!r} is not one of {', '.join(TASKS)}")
    columns = given.get("columns", {})
    _known(path, "columns: ", columns, COLUMNS)
    if not all(isinstance(name, str) for name in columns.values()):
        raise StudyFileError(f"{path}: columns must be such as {{text: sentence, label: class}}")
    if given.get("max_length", 1) < 1:
        raise StudyFileError(
            f"{path}: max_length {given['max_length']} keeps nothing of an example"
        )
    if given["task"] == "causal-lm" and "classes" in given:
        raise StudyFileError(f"{path}: causal-lm has no classes: leave them out")
    return given


def _known(path: Path, where: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    from difflib import get_close_matches

    for key in given:
        if key not in known:
            close = get_close_matches(str(key), known, 1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise StudyFileError(f"{path}: {where}{key} is unknown{meant}: use {', '.join(known)}")


def _listed(keys: Sequence[str]) -> str:
    return "; ".join(f"{key}: {KEYS[key]}" for key in keys)


def _needed(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise StudyFileError(
            f"a YAML study needs {module}: pip install 'whence-tda[{extra}]'"
        ) from error


def _folder(path: Path, key: str, place: str) -> Path:
    folder = Path(place)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise StudyFileError(
            f"{path}: {key} {place} {what}: give a folder, as seen from {Path.cwd()}"
        )
    return folder


def _last_checkpoint(folder: Path) -> Path:
    found = [f for f in folder.glob("checkpoint-*") if f.name.rpartition("-")[2].isdigit()]
    if not found:
        raise StudyFileError(
            f"{folder} has no checkpoint-* folders: give the output_dir of a Trainer"
        )
    return max(found, key=lambda f: int(f.name.rpartition("-")[2]))


def _tokenizer(path: Path, given: Mapping[str, Any], places: Sequence[Path]) -> Any:
    transformers = import_module("transformers")
    if "tokenizer" in given:
        places = [_folder(path, "tokenizer", given["tokenizer"])]
    for place in places:
        if any((place / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")):
            return transformers.AutoTokenizer.from_pretrained(str(place), local_files_only=True)
    looked = ", ".join(map(str, dict.fromkeys(places)))
    raise StudyFileError(f"{path}: no tokenizer in {looked}: name its folder as tokenizer:")


def _rows(encode: Encoder, path: Path, key: str, file: str | Path) -> list[dict[str, Any]]:
    """The examples of a file, encoded; an error names the line."""
    file = Path(file)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise StudyFileError(f"{path}: {key} {file} {what}: give a file, as seen from {Path.cwd()}")
    if file.suffix not in READERS:
        raise StudyFileError(f"{path}: {key} {file} is none of {', '.join(READERS)}")
    found = []
    try:
        text = io.StringIO(file.read_bytes().decode("utf-8-sig"), newline="")
    except UnicodeDecodeError as error:
        raise StudyFileError(f"{file} is not encoded in UTF-8: {error}") from error
    for number, row in READERS[file.suffix](text, str(encode.columns["text"])):
        try:
            found.append(encode(json.loads(row) if isinstance(row, str) else row))
        except (ValueError, TypeError) as error:
            raise StudyFileError(f"{file}, line {number}: {error}") from error
    if not found:
        raise StudyFileError(f"{file} is empty")
    return found


def _jsonl(lines: TextIO, column: str) -> Lines:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _csv(lines: TextIO, column: str) -> Lines:
    reader = csv.DictReader(lines)
    return ((reader.line_num, row) for row in reader)


def _text(lines: TextIO, column: str) -> Lines:
    return ((k, {column: line.rstrip("\r\n")}) for k, line in enumerate(lines, 1) if line.strip())


READERS: dict[str, Callable[[TextIO, str], Lines]] = {".jsonl": _jsonl, ".csv": _csv, ".txt": _text}
