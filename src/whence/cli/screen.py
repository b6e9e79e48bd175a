"""What every command does: answers on stdout, everything else on stderr, errors as exit codes.

A command is a function that returns an Answer. While it works, stdout is stderr, so that nothing
that a study file or a progress bar prints gets between a machine and its JSON.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import math
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

FINE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
PACKAGE = str(Path(__file__).parent.parent)
DEBUG = "WHENCE_DEBUG"  # set: tracebacks as they are

Json = Annotated[bool, typer.Option("--json", help="The answer as JSON, for machines.")]


@dataclass(frozen=True)
class Answer:
    """What a command has found.

    Attributes:
        data: for machines; anything JSON can hold, NumPy arrays and numbers too.
        text: for people: a string, or something that rich can print.
        code: the exit code.
    """

    data: Any
    text: Any = ""
    code: int = FINE


class CommandError(Exception):
    """What is wrong with the input, in one line that says what to do."""


def command(resumes: bool = False) -> Callable[[Callable[..., Answer]], Callable[..., int]]:
    """Make a command of a function: it gets the option --json, and its answer is printed.

    Args:
        resumes: whether the same command goes on where it was interrupted.
    """

    def wrap(function: Callable[..., Answer]) -> Callable[..., int]:
        @functools.wraps(function)
        def run(as_json: bool, **given: Any) -> int:
            try:
                with _stdout_kept(), _plain_warnings():
                    answer = function(**given)
            except KeyboardInterrupt:
                return _interrupted(resumes)
            except Exception as error:
                return _failed(error)
            if as_json:
                print(json.dumps(plain(answer.data), indent=2, ensure_ascii=False))
            elif answer.text != "":
                show(answer.text)
            return answer.code

        signature = inspect.signature(function, eval_str=True)
        option = inspect.Parameter(
            "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json
        )
        given = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values()]
        del run.__wrapped__
        run.__signature__ = inspect.Signature([*given, option])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*given, option]}
        return run

    return wrap


def guarded(function: Callable[..., object]) -> Callable[..., int]:
    """Make a command of a function that does its own printing: errors become exit codes."""

    @functools.wraps(function)
    def run(**given: Any) -> int:
        try:
            function(**given)
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception as error:
            return _failed(error)
        return FINE

    return run


def _failed(error: Exception) -> int:
    """Say what is wrong, and with which code to end."""
    if isinstance(error, (TyperException, typer.Exit)) or os.environ.get(DEBUG):
        raise error
    message, code = explained(error)
    say(f"whence: {message}")
    return code


def explained(error: BaseException) -> tuple[str, int]:
    """(message, exit code): bad input is what whence itself complains about; the rest failed."""
    message = re.sub(r"^\[Errno \d+\] ", "", str(error).strip()) or type(error).__name__
    if isinstance(error, CommandError):
        return message, BAD_INPUT
    frames = traceback.extract_tb(error.__traceback__)
    raised = (frames[-1].line or "").startswith("raise") or isinstance(error, OSError)
    told = isinstance(error, (ValueError, TypeError, OSError, LookupError, ImportError))
    told = told or type(error).__name__ == "RunError"
    if told and raised and frames[-1].filename.startswith(PACKAGE):
        return message, BAD_INPUT
    if type(error).__name__ == "OutOfMemoryError":
        hint = "try a smaller --batch-size, or --memory; what is done is kept"
        return f"out of memory: {hint} ({message.splitlines()[0]})", FAILED
    # NumPy gives no number: "problem writing element 5 to file", "9 requested and 3 written"
    full = isinstance(error, OSError) and (
        error.errno in (errno.ENOSPC, errno.EDQUOT) or (error.errno is None and "writ" in message)
    )
    if full:
        return f"the disk is full ({message}): make room, and give the same command again", FAILED
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{message}: choose another place, or get the right to use it", BAD_INPUT
    place = next((f for f in reversed(frames) if not installed(f.filename)), None)
    where = f" at {place.filename}, line {place.lineno}" if place else ""
    known = isinstance(error, FloatingPointError)
    named = message if known else f"{type(error).__name__}: {message}"
    hint = "" if known else f" ({DEBUG}=1 in front of the command shows the traceback)"
    return f"failed{where}: {named}{hint}", FAILED


def installed(file: str) -> bool:
    """Whether a file is whence's or a library's, not the user's."""
    return file.startswith((PACKAGE, sys.prefix, sys.base_prefix, "<")) or "-packages" in file


def _interrupted(resumes: bool) -> int:
    if resumes:
        again = shlex.join(["whence", *sys.argv[1:]])
        say(f"\ninterrupted. What is done is kept; the same command goes on from there:\n  {again}")
    else:
        say("\ninterrupted")
    return INTERRUPTED


def say(message: str) -> None:
    """A message for people, on stderr."""
    print(message, file=sys.stderr, flush=True)


def show(text: Any) -> None:
    """An answer for people, on stdout."""
    if isinstance(text, str):
        print(text)
        return
    from rich.console import Console

    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(text)


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """What is printed meanwhile goes to stderr, also by C code and by other processes."""
    try:
        sys.stdout.flush()
        own = os.dup(1)
    except (OSError, ValueError):  # closed: there is nothing to keep clean
        own = None
    try:
        if own is not None:
            os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if own is not None:
            os.dup2(own, 1)
            os.close(own)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as a line each, without the place in the code; and above a progress bar."""

    def tell(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        from tqdm import tqdm

        tqdm.write(f"warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = tell
        yield


def plain(value: Any) -> Any:
    """As JSON holds it: NumPy as lists and numbers, paths as text, NaN and infinity as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
