"""From texts on the command line to a method: what `--method` and its settings mean."""

from __future__ import annotations

import re
from difflib import get_close_matches
from operator import attrgetter
from typing import Any

from whence.cli.methods import METHODS, REQUIRED, Option
from whence.cli.screen import CommandError

# by the method as it is typed: its constructor in `whence.methods`, and its options by name
PATHS = {path.lower(): path for path in METHODS}
OPTIONS = {path.lower(): options for path, options in METHODS.items()}


def find(name: str) -> str:
    """The method that a name stands for, whatever its spelling: LeaveOneOut, leave-one-out."""
    method = re.sub(r"[-_ ]", "", name.lower())
    if method in OPTIONS:
        return method
    close = get_close_matches(method, OPTIONS, 1, 0.5)
    suggestion = f" Did you mean {close[0]}?" if close else ""
    raise CommandError(f"no method {name!r}.{suggestion} There are {', '.join(OPTIONS)}")


def method_class(method: str) -> Any:
    """The class of a method."""
    from whence import methods

    return getattr(methods, PATHS[method].partition(".")[0])


def constructor(method: str) -> Any:
    """What makes a method out of its settings: a class, or an alternative constructor of it."""
    from whence import methods

    return attrgetter(PATHS[method])(methods)


def arguments(method: str, given: dict[str, str | bool]) -> dict[str, Any]:
    """The constructor's arguments, from the options on the command line."""
    options = typed(method)
    for name in given:
        if name not in options:
            owners = [other for other in OPTIONS if name in typed(other)]
            available = ", ".join(flag(name, option) for name, option in options.items())
            raise CommandError(
                f"{flag(name, every_option()[name])} is a setting of {', '.join(owners)}, not of "
                f"{method}, which has {available}"
            )
    missing = [
        flag(name, option)
        for name, option in options.items()
        if option.default is REQUIRED and name not in given
    ]
    if missing:
        raise CommandError(f"method {method} needs {', '.join(missing)}")
    return {name: value(name, options[name], text) for name, text in given.items()}


def typed(method: str) -> dict[str, Option]:
    """The settings of a method that the command line takes."""
    return {name: option for name, option in OPTIONS[method].items() if not option.from_study}


def every_option() -> dict[str, Option]:
    """The settings that any method takes; where several share a name, the first one's."""
    merged: dict[str, Option] = {}
    for method in OPTIONS:
        merged = typed(method) | merged
    return merged


def flag(name: str, option: Option) -> str:
    """How a setting is typed: `--fisher`; a switch is named by what it changes: `--no-joint`."""
    turns_off = is_switch(option) and option.default is not False
    return ("--no-" if turns_off else "--") + name.replace("_", "-")


def is_switch(option: Option) -> bool:
    """Whether a setting is on or off, and takes no value."""
    return "bool" in _kinds(option)


def metavar(option: Option) -> str:
    """What stands for the value in help."""
    kinds = [kind for kind in _kinds(option) if kind != "None"]
    if "os.PathLike[str]" in kinds:
        return "FOLDER"
    words = {"int": "INT", "float": "FLOAT", "str": "NAME"}
    return words[kinds[0]] if len(kinds) == 1 and kinds[0] in words else "VALUE"


def help_text(option: Option) -> str:
    """The help, with the default."""
    if is_switch(option) or option.default in (None, REQUIRED):
        return option.help
    return f"{option.help} [{option.default}]"


def value(name: str, option: Option, text: str | bool) -> Any:
    """The value that a text on the command line stands for."""
    if isinstance(text, bool):
        return option.default is False
    kinds = _kinds(option)
    if "None" in kinds and text.lower() == "none":
        return None
    if "int" in kinds and re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if "Sequence[int]" in kinds and re.fullmatch(r"\d+(,\d+)*,?", text):
        return [int(part) for part in text.split(",") if part]
    if "float" in kinds:
        try:
            return float(text)
        except ValueError:
            pass
    if "str" in kinds and (not option.choices or text in option.choices):
        return text
    words = {"int": "a whole number", "float": "a number", "Sequence[int]": "numbers such as 3,14"}
    allowed = [*(words[kind] for kind in kinds if kind in words), *option.choices]
    raise CommandError(f"{flag(name, option)} {text}: use {_either(allowed)}")


def _kinds(option: Option) -> list[str]:
    return [part.strip() for part in option.type.split("|")]


def _either(words: list[str]) -> str:
    """'a, b or c'"""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
