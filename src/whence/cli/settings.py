"""The methods' settings, read from their source: what `whence attribute` takes as options.

Read, not imported, because help and usage errors must not wait for torch. A setting that a method
gets tomorrow is an option tomorrow.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from whence.cli.screen import CommandError

METHODS = Path(__file__).parent.parent / "methods"
FROM_STUDY = {"recipe": "Recipe"}  # settings that the study file gives, by what they are


@dataclass(frozen=True)
class Setting:
    """An argument of a method's constructor.

    Attributes:
        kinds: the parts of its annotation: "int", "float", "str", "bool", "Sequence[int]", "None".
        default: as text; None where it must be given.
        about: what the method's docstring says of it.
    """

    name: str
    kinds: tuple[str, ...]
    default: str | None
    about: str

    @property
    def option(self) -> str:
        """A flag is named by what it changes."""
        return ("--no-" if self.default == "True" else "--") + self.name.replace("_", "-")

    @property
    def flag(self) -> bool:
        return self.kinds == ("bool",)

    @property
    def metavar(self) -> str:
        if "os.PathLike[str]" in self.kinds:
            return "FOLDER"
        words = {"int": "INT", "float": "FLOAT", "str": "NAME"}
        kinds = [kind for kind in self.kinds if kind != "None"]
        return words[kinds[0]] if len(kinds) == 1 and kinds[0] in words else "VALUE"

    @property
    def help(self) -> str:
        said = self.about.removesuffix(".") + "."
        return said if self.flag or self.default in (None, "None") else f"{said} [{self.default}]"

    def read(self, text: str | bool) -> Any:
        """The value that a text on the command line stands for."""
        if isinstance(text, bool):
            return self.default != "True"
        if "None" in self.kinds and text.lower() == "none":
            return None
        if "int" in self.kinds and re.fullmatch(r"[+-]?\d+", text):
            return int(text)
        if "Sequence[int]" in self.kinds and re.fullmatch(r"\d+(,\d+)*,?", text):
            return [int(part) for part in text.split(",") if part]
        if "float" in self.kinds:
            try:
                return float(text)
            except ValueError:
                pass
        if "str" in self.kinds:
            return text
        raise CommandError(f"{self.option} {text}: give {self.metavar}")


@cache
def methods() -> dict[str, dict[str, Setting]]:
    """{method, as it is typed: {setting: Setting}}, of all that `whence.methods` exports."""
    classes: dict[str, ast.ClassDef] = {}
    for statement in _parsed(METHODS / "__init__.py").body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            body = _parsed(METHODS / f"{statement.module.rpartition('.')[2]}.py").body
            own = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
            classes |= {name.name: own[name.name] for name in statement.names}
    first = sorted(classes, key=lambda name: name != "Source")
    return {name.lower(): _settings(name, classes) for name in first}


def find(name: str) -> str:
    """The method that is meant by a name, however it is spelt: LeaveOneOut, leave-one-out."""
    plain = re.sub(r"[-_ ]", "", name.lower())
    if plain in methods():
        return plain
    close = get_close_matches(plain, methods(), 1, 0.5)
    meant = f" Did you mean {close[0]}?" if close else ""
    raise CommandError(f"no method {name!r}.{meant} There are {', '.join(methods())}")


def kind(method: str) -> Any:
    """The class of a method."""
    from whence import methods as exported

    return next(getattr(exported, name) for name in exported.__all__ if name.lower() == method)


def chosen(method: str, given: dict[str, str | bool]) -> dict[str, Any]:
    """The constructor's arguments, from the options that were given."""
    own = methods()[method]
    typed = {name: setting for name, setting in own.items() if name not in FROM_STUDY}
    for name in given:
        if name not in own:
            owners = [other for other, settings in methods().items() if name in settings]
            has = ", ".join(setting.option for setting in typed.values())
            raise CommandError(
                f"{options()[name].option} is a setting of {', '.join(owners)}, not of {method}, "
                f"which has {has}"
            )
    missing = [s.option for n, s in typed.items() if s.default is None and n not in given]
    if missing:
        raise CommandError(f"method {method} needs {', '.join(missing)}")
    return {name: own[name].read(text) for name, text in given.items()}


def options() -> dict[str, Setting]:
    """Every setting that any method takes from the command line."""
    found: dict[str, Setting] = {}
    for own in methods().values():
        found = {name: s for name, s in own.items() if name not in FROM_STUDY} | found
    return found


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _settings(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, Setting]:
    node = classes[name]
    made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    if not made:  # the constructor is that of the method it is a kind of
        base = next(b.id for b in node.bases if isinstance(b, ast.Name) and b.id in classes)
        return _settings(base, classes)
    arguments = made[0].args
    plain = arguments.args[1:]
    padding: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    pairs = [*zip(plain, padding + list(arguments.defaults), strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    about = _about(ast.get_docstring(node) or "")
    return {
        argument.arg: Setting(
            argument.arg,
            tuple(part.strip() for part in ast.unparse(argument.annotation).split("|"))
            if argument.annotation
            else ("str",),
            None if default is None else str(ast.literal_eval(default)),
            about.get(argument.arg, ""),
        )
        for argument, default in pairs
    }


def _about(docstring: str) -> dict[str, str]:
    """What the section Args of a docstring says of each argument; "a, b: ..." is about both."""
    section = re.search(r"^Args:\n((?: {4}.*\n?|\n)+)", docstring, re.M)
    found: dict[str, str] = {}
    for entry in re.split(r"\n {4}(?! )", "\n" + section[1].rstrip()) if section else []:
        names, _, text = entry.strip().partition(": ")
        plain = " ".join(text.split()).replace("`", "")
        found |= {name.strip(): plain for name in names.split(",") if name.strip()}
    return found
