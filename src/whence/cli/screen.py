"""What all commands share: answers on stdout, everything else on stderr, errors as exit codes.

A command is a function that returns an Answer. While it runs, stdout is redirected to stderr, so
that the output of a study file or a progress bar cannot mix with the JSON.
"""

from __future__ import annotations

import errno
import inspect
import json
import math
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from whence.cli import processes
from whence.cli.signature import documented
from whence.errors import NotFinite, WhenceError
from whence.table import escaped

FINE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
PACKAGE = str(Path(__file__).parent.parent)
DEBUG = "WHENCE_DEBUG"  # if set, tracebacks are shown

Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


@dataclass(frozen=True)
class Answer:
    """The answer of a command.

    Attributes:
        data: for --json; anything JSON can hold, and NumPy arrays and numbers.
        text: for people: a string, or anything that rich can print.
        code: the exit code.
    """

    data: Any
    text: Any = ""
    code: int = FINE


class CommandError(WhenceError):
    """Invalid arguments or options. The message is one line that says what to do."""


def command(
    resumes: bool = False,
    shared: bool = False,
    options: Callable[..., dict[str, Any]] | None = None,
    only: Collection[str] | None = None,
) -> Callable[[Callable[..., Answer]], Callable[..., int]]:
    """Turn a function into a command: add the option --json, and print the answer.

    Args:
        resumes: whether the same command resumes after an interruption.
        shared: whether several processes divide its work. The first one prints the answer.
        options: a function of options that several commands have. They are added to the command's
            own, and it gets the function's result as its argument `options`.
        only: those of them that the command has (default: all).
    """
    common = [] if options is None else documented(options)[1]
    common = [p for p in common if only is None or p.name in only]

    def wrap(function: Callable[..., Answer]) -> Callable[..., int]:
        def run(as_json: bool, **given: Any) -> int:
            try:
                together = processes.joined(shared, given.get("device"))
                if options is not None:
                    given["options"] = options(**{p.name: given.pop(p.name) for p in common})
                with _stdout_to_stderr(), _one_line_warnings(), together:
                    answer = function(**given)
            except KeyboardInterrupt:
                return _interrupted(resumes)
            except Exception as error:
                return _failed(error)
            if shared and processes.rank() != 0:
                return answer.code
            if as_json:
                # an escaped character is the same in JSON
                print(escaped(json.dumps(jsonable(answer.data), indent=2, ensure_ascii=False)))
            elif answer.text != "":
                show(answer.text)
            return answer.code

        json_option = inspect.Parameter(
            "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json
        )
        return _declare(run, function, [*common, json_option])

    return wrap


def guarded(function: Callable[..., object]) -> Callable[..., int]:
    """Turn a function that prints for itself into a command: errors become exit codes."""

    def run(**given: Any) -> int:
        try:
            function(**given)
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception as error:
            return _failed(error)
        return FINE

    return _declare(run, function, [])


def _declare(
    run: Callable[..., int], function: Callable[..., Any], more: list[inspect.Parameter]
) -> Callable[..., int]:
    """`run` with the name, the help and the options of a command's function, and more options."""
    run.__doc__, parameters = documented(function)
    parameters = [*(p for p in parameters if p.name != "options"), *more]
    run.__name__, run.__module__ = function.__name__, function.__module__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _failed(error: Exception) -> int:
    """Print what is wrong, and return the exit code."""
    if isinstance(error, (TyperException, typer.Exit)) or os.environ.get(DEBUG):
        raise error
    message, code = explain(error)
    say(f"{processes.named()}: {message}")
    return code


def explain(error: BaseException) -> tuple[str, int]:
    """(message, exit code). A WhenceError is about the input; anything else is a failure, reported
    with the line of the user's code that led to it."""
    message = re.sub(r"^\[Errno \d+\] ", "", str(error).strip()) or type(error).__name__
    diverged = isinstance(error, NotFinite)  # not the input's fault: the calculation failed
    if isinstance(error, WhenceError) and not diverged:
        return message, BAD_INPUT
    torch = sys.modules.get("torch")  # not imported: then it cannot be torch's error
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        hint = "try a smaller --batch-size or --memory; finished work is kept"
        return f"out of memory: {hint} ({message.splitlines()[0]})", FAILED
    if isinstance(error, OSError):
        # NumPy sets no errno: "problem writing element 5 to file", "9 requested and 3 written"
        unwritten = error.errno is None and "writ" in message
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or unwritten:
            return f"the disk is full ({message}): free some space and run this again", FAILED
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EADDRINUSE):
            advice = ": choose another path, or change its permissions" if error.filename else ""
            return message + advice, BAD_INPUT
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if not installed(f.filename)), None)
    where = f" at {place.filename}, line {place.lineno}" if place else ""
    if diverged:
        return f"failed{where}: {message}", FAILED
    hint = f"set {DEBUG}=1 to see the traceback"
    return f"failed{where}: {type(error).__name__}: {message} ({hint})", FAILED


def installed(file: str) -> bool:
    """Whether a file belongs to whence or to a library, not to the user."""
    return file.startswith((PACKAGE, sys.prefix, sys.base_prefix, "<")) or "-packages" in file


def _interrupted(resumes: bool) -> int:
    if processes.rank() != 0:  # the first process says it for all
        return INTERRUPTED
    if resumes:
        again = processes.launcher() + shlex.join(["whence", *sys.argv[1:]])
        say(f"\ninterrupted. Finished work is kept; to resume, run the same command:\n  {again}")
    else:
        say("\ninterrupted")
    return INTERRUPTED


def say(message: str) -> None:
    """Print a message on stderr."""
    print(escaped(message), file=sys.stderr, flush=True)


def show(text: Any) -> None:
    """Print an answer on stdout."""
    if isinstance(text, str):
        print(escaped(text))
        return
    from rich.console import Console

    # No markup: a stage may be called "[/bold]".
    console = Console(
        color_system=None if os.environ.get("NO_COLOR") else "auto",  # rich would still write bold
        soft_wrap=not sys.stdout.isatty(),
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(_Escaped(text))


@dataclass(frozen=True)
class _Escaped:
    """What rich draws, with its text escaped."""

    drawn: Any

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        for segment in console.render(self.drawn, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect what is printed meanwhile to stderr, including by C code and other processes."""
    try:
        sys.stdout.flush()
        stdout = os.dup(1)
    except (OSError, ValueError):  # stdout is closed: there is nothing to protect
        stdout = None
    try:
        if stdout is not None:
            os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if stdout is not None:
            os.dup2(stdout, 1)
            os.close(stdout)


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Show each warning as one line above the progress bar, without its place in the code."""

    def show_warning(message: Warning | str, *place: Any, **more: Any) -> None:
        from tqdm import tqdm

        if processes.rank() == 0:
            tqdm.write(escaped(f"warning: {message}"), file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        yield


def jsonable(value: Any) -> Any:
    """A value for JSON: NumPy as lists and numbers, paths as text, NaN and infinity as null."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
