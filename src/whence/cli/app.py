"""The commands, and how they are run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer
import typer.rich_utils
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from whence.cli import (
    attributing,
    doctor,
    estimating,
    init,
    judging,
    looking,
    print_version,
    selecting,
    settings,
    whatif,
)
from whence.cli.screen import BAD_INPUT, FINE, INTERRUPTED, CommandError, say

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def build(given: Sequence[str] = ()) -> typer.Typer:
    """All commands.

    Args:
        given: the arguments, which decide whose settings help shows and whether `reproduce` is
            imported.
    """
    app = typer.Typer(
        name="whence",
        help="Where in its training data does a model's behaviour come from?",
        epilog="Start with `whence demo`, or check a study file: `whence doctor study.py`.",
        cls=_Group,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_version)
    app.command("demo", cls=_Command, context_settings=PASS_THROUGH, rich_help_panel="Start here")(
        _demo
    )
    layers, fit, attribute, top = attributing.commands(_requested_method(given))
    panels = {
        "Start here": [init.init, doctor.doctor, estimating.estimate],
        "Attribute": [layers, fit, attribute],
        "Look": [top, looking.report, looking.card, looking.explore, whatif.whatif],
        "Act": [selecting.audit, selecting.select],
        "Judge": [judging.truth, judging.lds, judging.score_against, judging.removal],
    }
    for panel, functions in panels.items():
        for function in functions:
            name = function.__name__.replace("_", "-")
            app.command(name, cls=_Command, rich_help_panel=panel)(function)
    reproduce = _load_reproduce() if list(given[:1]) == ["reproduce"] else _reproduce
    app.command("reproduce", cls=_Command, rich_help_panel="Judge")(reproduce)
    return app


def run(given: Sequence[str]) -> int:
    """Run `whence` with these arguments, and return the exit code."""
    words = list(given) or shlex.split(os.environ.get("COMP_WORDS", ""))  # of a shell's completion
    program = typer.main.get_command(build(words))
    if os.environ.get("NO_COLOR"):
        typer.rich_utils.COLOR_SYSTEM = None  # by itself, rich still writes bold
    try:
        code = program.main(
            args=list(given) or ["--help"], prog_name="whence", standalone_mode=False
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "whence"
        message = " ".join(error.format_message().split())
        if message:
            say(f"{path}: {message} (see {path} --help)")
        return BAD_INPUT
    return code if isinstance(code, int) else FINE


class _PlainSwitches:
    """Help without a type behind switches, which take no value."""

    def get_params(self, context: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class _Command(_PlainSwitches, TyperCommand):
    pass


class _Group(_PlainSwitches, TyperGroup):
    pass


def _requested_method(given: Sequence[str]) -> str:
    """The method after --method, before the options are parsed: help shows its settings."""
    for before, word in pairwise(["", *given]):
        name = word.removeprefix("--method=") if before != "--method" else word
        if name != word or before == "--method":
            with suppress(CommandError):
                return settings.find(name)
    return "source"


def _version(
    version: Annotated[
        bool | None,
        typer.Option("--version", is_eager=True, help="Print the version.", show_default=False),
    ] = None,
) -> None:
    if version:
        raise typer.Exit(print_version())


def _demo(context: typer.Context) -> int:
    """Take a one-minute tour: train, find wrong labels, prove it by retraining."""
    from whence.demo import main

    return main(context.args)


def _reproduce() -> None:
    """Rerun the paper's experiments and compare."""


def _load_reproduce() -> Any:
    """The command `reproduce`, or one that explains why it cannot be imported."""
    try:
        return import_module("whence.cli.reproduce").reproduce
    except ImportError as error:
        message = (
            f"whence: cannot load `reproduce` ({error}): run it in a checkout of the repository"
        )

        def refuse() -> int:
            say(message)
            return BAD_INPUT

        refuse.__doc__ = _reproduce.__doc__
        return refuse
