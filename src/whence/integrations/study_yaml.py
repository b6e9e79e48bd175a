"""A study described by a YAML file: the folder of a Trainer, a tokenizer and files of examples.

    output_dir: out                    # with its checkpoint-* folders
    task: causal-lm                    # or sequence-classification
    train: train.jsonl                 # .jsonl, .csv, or .txt with one example per line
    query: questions.jsonl

Nothing is downloaded, and nothing is unpickled.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from whence.errors import InvalidInput, optional

if TYPE_CHECKING:
    from whence.study import Study

NumberedRows = Iterator[tuple[int, Any]]  # line number; a row, or its JSON
IGNORED = -100  # label of positions without a loss
COLUMNS = {"text": "text", "text_pair": None, "prompt": None, "label": "label"}
#: every key, and what it means
KEYS = {
    "output_dir": "the Trainer's output_dir, with checkpoint-* folders",
    "task": "causal-lm or sequence-classification",
    "train": "the training examples, as the Trainer saw them: .jsonl, .csv or .txt",
    "query": "the queries, in the same format",
    "model": "a folder with config.json (default: the last checkpoint)",
    "tokenizer": "a folder with a tokenizer (default: the last checkpoint, then output_dir)",
    "columns": "names of the columns {text, text_pair, prompt, label}",
    "max_length": "number of tokens to keep of an example",
    "measurement": "what to measure: as in whence.Classification and LanguageModeling",
    "reduction": "causal-lm: mean or sum over an example's tokens",
    "layers": "patterns of the layers to track, or matrices",
    "cache": "folder for fitted factors (default: output_dir/factors)",
    "classes": "names of the classes (default: the model's)",
    "notes": "what SOURCE does not model, such as `{clip_norm: 1.0}`",
}
REQUIRED = ("output_dir", "task", "train")
#: types of values other than text
TYPES: dict[str, tuple[type, ...]] = {
    "columns": (dict,),
    "max_length": (int,),
    "layers": (str, list),
    "classes": (list, dict),
    "notes": (dict,),
}
TYPE_NAMES = {str: "text", int: "a number", list: "a list", dict: "a mapping"}
TASKS = {
    "causal-lm": ("AutoModelForCausalLM", "LanguageModeling"),
    "sequence-classification": ("AutoModelForSequenceClassification", "Classification"),
}


@dataclass(frozen=True)
class StudyYaml:
    """What a YAML file describes.

    Attributes:
        query: the queries, or None.
        display: how to show examples: `tokenizer`, and `classes` of a classifier.
        read_queries: reads queries from another data file.
    """

    study: Study
    query: list[dict[str, Any]] | None
    display: dict[str, Any]
    read_queries: Callable[[Path], list[dict[str, Any]]]


def read_study_yaml(path: Path) -> StudyYaml:
    """Read a study from a YAML file, whose paths are relative to the current folder."""
    given = _read(path)
    with optional("a YAML study needs transformers", "huggingface"):
        import transformers
    import whence
    from whence.documents import filled_up
    from whence.run import Run

    auto_class, task_name = TASKS[given["task"]]
    output_dir = _folder(path, "output_dir", given["output_dir"])
    last = _last_checkpoint(output_dir)
    model_folder = _folder(path, "model", given["model"]) if "model" in given else last
    if not (model_folder / "config.json").is_file():
        is_adapter = (model_folder / "adapter_config.json").is_file()
        raise InvalidInput(
            f"{path}: {model_folder} has no config.json"
            + (", but a PEFT adapter: write a study.py that builds the model" * is_adapter)
            + (": name a folder that has one, as model:" * (not is_adapter))
        )
    config = transformers.AutoConfig.from_pretrained(str(model_folder), local_files_only=True)
    model = getattr(transformers, auto_class).from_config(config).float()
    tokenizer = _tokenizer(path, given, [last, output_dir, model_folder])
    encode = Encoder(
        tokenizer,
        given["task"] == "causal-lm",
        COLUMNS | given.get("columns", {}),
        given.get("max_length"),
        config,
    )
    read = partial(_read_examples, encode, path)
    train = read("train", given["train"])
    settings = {k: given[k] for k in ("measurement", "reduction") if k in given}
    try:
        task = getattr(whence, task_name)(**settings)
    except TypeError as error:
        raise InvalidInput(f"{path}: {given['task']} has no reduction ({error})") from error
    display: dict[str, Any] = {"tokenizer": tokenizer}
    if given["task"] != "causal-lm":
        names = getattr(config, "id2label", {})
        display["classes"] = given.get("classes", [names[k] for k in sorted(names)])
    study = whence.Study(
        model,
        task,
        train,
        Run.from_huggingface(output_dir, model, size=len(train), notes=given.get("notes")),
        collate=partial(filled_up, pad=tokenizer.pad_token_id or 0),
        cache=given.get("cache", output_dir / "factors"),
        layers=given.get("layers"),
    )
    query = read("query", given["query"]) if "query" in given else None
    return StudyYaml(study, query, display, partial(read, "--query"))


@dataclass(frozen=True)
class Encoder:
    """Turns a row of a file into the inputs of the model."""

    tokenizer: Any
    language: bool
    columns: Mapping[str, str | None]
    max_length: int | None
    config: Any

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        text, pair, prompt = (self._text(row, role) for role in ("text", "text_pair", "prompt"))
        options: dict[str, Any] = {
            "truncation": self.max_length is not None,
            "max_length": self.max_length,
        }
        if prompt is not None:
            text = prompt + text
        if self.language:
            options["return_offsets_mapping"] = self.tokenizer.is_fast
        encoded = {k: list(v) for k, v in self.tokenizer(text, pair, **options).items()}
        if not encoded["input_ids"]:
            raise InvalidInput(f"{text!r} has no tokens")
        if not self.language:
            return encoded | {"labels": self._label(self._value(row, "label"))}
        offsets = encoded.pop("offset_mapping", None)
        count = 0 if prompt is None else _prompt_token_count(offsets, len(prompt))
        return encoded | {"labels": [IGNORED] * count + encoded["input_ids"][count:]}

    def _text(self, row: Mapping[str, Any], role: str) -> Any:
        value = self._value(row, role)
        if self.columns[role] is not None and not isinstance(value, str):
            raise InvalidInput(f"column {self.columns[role]!r} holds {value!r}, which is not text")
        return value

    def _value(self, row: Mapping[str, Any], role: str) -> Any:
        column = self.columns[role]
        if column is None:
            return None
        if not isinstance(row, Mapping):
            raise InvalidInput(f"{row!r} is not a row: give {{{column!r}: ...}}")
        if column not in row:
            raise InvalidInput(
                f"no column {column!r} (it has {', '.join(map(str, row))}): name the column of "
                f"the {role} as columns: {{{role}: ...}}"
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
            raise InvalidInput(
                f"label {label!r} is neither a number nor a class ({known})"
            ) from None
        if not 0 <= number < max(2, self.config.num_labels):
            raise InvalidInput(
                f"label {number}, but the model has {self.config.num_labels} classes"
            )
        return number


def _prompt_token_count(offsets: list[tuple[int, int]] | None, length: int) -> int:
    """The number of tokens that a prompt of `length` characters takes, from the left."""
    if offsets is None:
        raise InvalidInput("a prompt column needs a fast tokenizer (tokenizer.json)")
    return next((k for k, (_, end) in enumerate(offsets) if end > length), len(offsets))


def _read(path: Path) -> dict[str, Any]:
    with optional("a YAML study needs yaml", "cli"):
        import yaml
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(given, dict):
        raise InvalidInput(f"{path} is not a mapping of settings: it needs {_listed(REQUIRED)}")
    _check_keys(path, "", given, KEYS)
    given = {key: value for key, value in given.items() if value is not None}  # a bare "query:"
    for key, value in given.items():
        types = TYPES.get(key, (str,))
        if not isinstance(value, types) or isinstance(value, bool):
            expected = " or ".join(TYPE_NAMES[kind] for kind in types)
            raise InvalidInput(f"{path}: {key} must be {expected}, not {value!r}: {KEYS[key]}")
    missing = [key for key in REQUIRED if key not in given]
    if missing:
        raise InvalidInput(f"{path} lacks {_listed(missing)}")
    if given["task"] not in TASKS:
        raise InvalidInput(f"{path}: task {given['task']!r} is not one of {', '.join(TASKS)}")
    columns = given.get("columns", {})
    _check_keys(path, "columns: ", columns, COLUMNS)
    if not all(isinstance(name, str) for name in columns.values()):
        raise InvalidInput(
            f"{path}: columns must map to names, as {{text: sentence, label: class}}"
        )
    if given.get("max_length", 1) < 1:
        raise InvalidInput(
            f"{path}: max_length {given['max_length']} leaves no tokens: use at least 1"
        )
    if given["task"] == "causal-lm" and "classes" in given:
        raise InvalidInput(f"{path}: causal-lm has no classes: remove them")
    return given


def _check_keys(path: Path, where: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    from difflib import get_close_matches

    for key in given:
        if key not in known:
            close = get_close_matches(str(key), known, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise InvalidInput(f"{path}: {where}{key} is unknown{hint}: use {', '.join(known)}")


def _listed(keys: Sequence[str]) -> str:
    return "; ".join(f"{key}: {KEYS[key]}" for key in keys)


def _folder(path: Path, key: str, place: str) -> Path:
    folder = Path(place)
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise InvalidInput(
            f"{path}: {key} {place} {problem}: give a folder, relative to {Path.cwd()}"
        )
    return folder.absolute()


def _last_checkpoint(folder: Path) -> Path:
    checkpoints = [f for f in folder.glob("checkpoint-*") if f.name.rpartition("-")[2].isdigit()]
    if not checkpoints:
        raise InvalidInput(
            f"{folder} has no checkpoint-* folders: give the output_dir of a Trainer"
        )
    return max(checkpoints, key=lambda f: int(f.name.rpartition("-")[2]))


def _tokenizer(path: Path, given: Mapping[str, Any], folders: Sequence[Path]) -> Any:
    import transformers

    if "tokenizer" in given:
        folders = [_folder(path, "tokenizer", given["tokenizer"])]
    for folder in folders:
        if any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")):
            return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    searched = ", ".join(map(str, dict.fromkeys(folders)))
    raise InvalidInput(f"{path}: no tokenizer in {searched}: name its folder as tokenizer:")


def _read_examples(encode: Encoder, path: Path, key: str, file: str | Path) -> list[dict[str, Any]]:
    """The encoded examples of a file. An error names the line."""
    file = Path(file)
    if not file.is_file():
        problem = "is a folder" if file.is_dir() else "does not exist"
        raise InvalidInput(f"{path}: {key} {file} {problem}: give a file, relative to {Path.cwd()}")
    if file.suffix not in READERS:
        raise InvalidInput(f"{path}: {key} {file} is none of {', '.join(READERS)}")
    examples = []
    try:
        text = io.StringIO(file.read_bytes().decode("utf-8-sig"), newline="")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is not encoded in UTF-8: {error}") from error
    for number, row in READERS[file.suffix](text, str(encode.columns["text"])):
        try:
            examples.append(encode(json.loads(row) if isinstance(row, str) else row))
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"{file}, line {number}: {error}") from error
    if not examples:
        raise InvalidInput(f"{file} is empty")
    return examples


def _jsonl(lines: TextIO, column: str) -> NumberedRows:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _csv(lines: TextIO, column: str) -> NumberedRows:
    reader = csv.DictReader(lines)
    return ((reader.line_num, row) for row in reader)


def _text(lines: TextIO, column: str) -> NumberedRows:
    return ((k, {column: line.rstrip("\r\n")}) for k, line in enumerate(lines, 1) if line.strip())


READERS: dict[str, Callable[[TextIO, str], NumberedRows]] = {
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".txt": _text,
}
