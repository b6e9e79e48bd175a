"""A study, out of one file: Python that defines it, or a YAML about Hugging Face folders.

A Python file is imported, with its own folder on the path, as `python study.py` would have it, but
under its own name: what stands under `if __name__ == "__main__":` does not run. It defines

    study      a whence.Study                                       (this alone must be there)
    query      the queries, a dataset built like the training data
    recipe     a whence.Recipe, for commands that retrain
    classes, columns, renderer, tokenizer                           how examples are shown

Paths in it are, as on the command line, seen from where the command is run.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from whence.cli.screen import installed, say

if TYPE_CHECKING:
    from whence.retrain.recipe import Recipe
    from whence.study import Study

SHOWN = ("classes", "columns", "renderer", "tokenizer")  # how examples are shown


class StudyFileError(ValueError):
    """A study file that cannot be used: what is wrong, in which line of it."""


@dataclass(frozen=True)
class StudyFile:
    """What a study file defines.

    Attributes:
        names: everything that it defines, by name.
        shown: of `classes`, `columns`, `renderer`, `tokenizer`, those that it defines.
        other: those of that name that cannot be meant for showing examples, and why.
        queries: makes queries of a data file, for a YAML.
    """

    path: Path
    study: Study
    query: Any = None
    recipe: Recipe | None = None
    shown: dict[str, Any] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict, repr=False)
    queries: Any = field(default=None, repr=False)

    @property
    def train(self) -> Any:
        """The training data: a dataset, or {stage: dataset} of several stages."""
        train = self.study.train
        return next(iter(train.values())) if len(train) == 1 else train

    def asked(self, name: str | None) -> Any:
        """The queries of that name: None for "self", the file's `query` by default."""
        if name == "self":
            return None
        if name is None:
            if self.query is None:
                raise StudyFileError(
                    f"{self.path} gives no `query`: define the queries in it, name them with "
                    "--query, or use --query self for each training example's effect on itself"
                )
            return self.query
        if self.queries is not None:
            return self.queries(Path(name))
        if name not in self.names:
            known = [
                n
                for n, v in self.names.items()
                if hasattr(v, "__getitem__") and n[0] != "_" and not isinstance(v, (type, str))
            ]
            raise StudyFileError(
                f"{self.path} defines no {name!r} for --query: it has {', '.join(known) or 'none'}"
            )
        return self.names[name]

    def looks(self) -> dict[str, Any]:
        """How examples are shown; what is not used for it is said."""
        for why in self.other.values():
            say(f"warning: {why}")
        return self.shown

    def needs_recipe(self) -> Recipe:
        if self.recipe is None and self.path.suffix != ".py":
            raise StudyFileError(
                f"{self.path} says how to attribute, not how to train, which this needs: write a "
                "study.py that defines `study` and `recipe`"
            )
        if self.recipe is None:
            raise StudyFileError(
                f"{self.path} defines no `recipe`, and this needs to train: add "
                "recipe = whence.Recipe(make_model, task, train, optimizer=..., batch_size=..., "
                "epochs=...)"
            )
        return self.recipe


def load_study(path: str | Path) -> StudyFile:
    """What a study file, .py or .yaml, defines. What is wrong with it is a StudyFileError."""
    path = Path(path)
    if path.is_dir():
        inside = sorted(f.name for f in path.iterdir() if f.suffix in (".py", ".yaml", ".yml"))
        found = f" (in it: {', '.join(inside[:5])})" if inside else ""
        what = "is a run's folder" if (path / "run.json").exists() else "is a folder"
        raise StudyFileError(f"{path} {what}: give a study file, such as study.py{found}")
    if not path.exists():
        raise StudyFileError(f"{path} does not exist: give a study file, such as study.py")
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(path)
    if path.suffix != ".py":
        raise StudyFileError(f"{path} is neither a .py nor a .yaml file: give a study file")
    names = vars(_imported(path))
    return StudyFile(
        path,
        _checked(path, names),
        names.get("query"),
        _recipe(path, names),
        *_looks(path, names),
        dict(names),
    )


def _from_yaml(path: Path) -> StudyFile:
    from whence.integrations.study_yaml import StudyYamlError, read_study_yaml
    from whence.study import Study

    try:
        parts = read_study_yaml(path)
    except StudyYamlError as error:
        raise StudyFileError(str(error)) from error
    study = Study(
        parts.model,
        parts.task,
        parts.train,
        parts.run,
        collate=parts.collate,
        cache=parts.cache,
        layers=parts.layers,
    )

    def queries(file: Path) -> Any:
        try:
            return parts.read_queries(file)
        except StudyYamlError as error:
            raise StudyFileError(str(error)) from error

    return StudyFile(path, study, parts.query, shown=parts.display, queries=queries)


def _imported(path: Path) -> ModuleType:
    """The file as a module, which processes that load data find again by its name."""
    name = re.sub(r"\W", "_", path.stem)
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path.resolve()):
        name = f"study_file_{name}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        raise StudyFileError(
            f"{_place(path, end)} ends the program (exit code {end.code}): put what is not the "
            'study under if __name__ == "__main__":'
        ) from end
    except SyntaxError as error:
        own = error.filename in (None, str(path.resolve()))
        where = str(path if own else error.filename)
        where += "" if error.lineno is None else f", line {error.lineno}"
        raise StudyFileError(f"{where}: {type(error).__name__}: {error.msg}") from error
    except BaseException as error:
        raise StudyFileError(f"{_place(path, error)}: {_said(path, error)}") from error
    return module


def _said(path: Path, error: BaseException) -> str:
    from whence.run import RunError

    message = " ".join(str(error).split())
    if isinstance(error, ImportError) and "relative import" in message:
        message += " (the file is no part of a package: what lies beside it is imported by name)"
    away = path.resolve().parent != Path.cwd()
    if isinstance(error, (OSError, RunError)) and away:
        message += f" (paths in the file are seen from where the command is run, {Path.cwd()})"
    if isinstance(error, RunError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _place(path: Path, error: BaseException) -> str:
    """The innermost line of the file on the way to an error, and of what the user has beside it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).resolve() == path.resolve()]
    place = f"{path}, line {own[-1].lineno}" if own else str(path)
    users = [f for f in frames if not installed(f.filename)]
    if users and own and users[-1].filename != own[-1].filename:
        place += f" (at {users[-1].filename}, line {users[-1].lineno})"
    return place


def _looks(path: Path, names: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """What is meant for showing examples; and what only has such a name, and why."""
    from whence.present.examples import check_looks

    shown: dict[str, Any] = {}
    other: dict[str, str] = {}
    for name in SHOWN:
        value = names.get(name)
        try:
            check_looks(**{name: value})
        except TypeError as error:
            other[name] = f"{path}: {error} to show examples by; it is not used"
        else:
            shown |= {} if value is None else {name: value}
    return shown, other


def _checked(path: Path, names: dict[str, Any]) -> Study:
    from whence.study import Study

    if "study" not in names:
        found = [name for name, value in names.items() if isinstance(value, Study)]
        hint = f" (call {found[0]!r} so)" if found else ""
        raise StudyFileError(
            f"{path} defines no `study`{hint}: it needs a line "
            "study = whence.Study(model, task, train, runs=...)"
        )
    study = names["study"]
    if not isinstance(study, Study):
        raise StudyFileError(f"`study` in {path} is a {type(study).__name__}, not a whence.Study")
    return study


def _recipe(path: Path, names: dict[str, Any]) -> Recipe | None:
    from whence.retrain.recipe import Recipe

    recipe = names.get("recipe")
    if recipe is not None and not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        raise StudyFileError(f"`recipe` in {path} is a {kind}, not a whence.Recipe")
    return recipe
