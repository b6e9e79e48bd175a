"""The command line: a thin shell over the functions of the library.

    whence demo
    whence attribute study.py --method source --segments 3 --out scores/source
    whence top scores/source --query 3

No command imports torch before its arguments are checked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

EXTRA = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `whence` command.

    Returns:
        The exit code: 0 success, 1 failure, 2 bad input, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    except KeyboardInterrupt:  # before a command started: there is nothing to resume
        return 130


def print_version() -> int:
    from whence import __version__

    print(f"whence {__version__}")
    return 0


def _run(given: list[str]) -> int:
    if given[:1] == ["demo"]:  # works without the extra
        from whence.demo import main as demo

        return demo(given[1:])
    if given == ["--version"]:  # likewise
        return print_version()
    try:
        from whence.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        print(
            f"whence: {error.name} is missing; all commands except `whence demo` need it: "
            "pip install 'whence-tda[cli]'",
            file=sys.stderr,
        )
        return 2
    return run(given)
