"""The command line: a thin shell over the same functions.

    whence demo
    whence attribute study.py --method source --segments 3 --out scores/source
    whence top scores/source --query 3

Nothing here imports torch before a command has understood its arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

EXTRA = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `whence` command. Returns its exit code: 0 fine, 1 failed, 2 bad input,
    130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    except KeyboardInterrupt:  # before a command was at work: nothing to go on with
        return 130


def _run(given: list[str]) -> int:
    if given[:1] == ["demo"]:  # works from a plain install
        from whence.demo import main as demo

        return demo(given[1:])
    try:
        from whence.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        print(
            f"whence: {error.name} is missing, which all commands but `whence demo` need: "
            "pip install 'whence-tda[cli]'",
            file=sys.stderr,
        )
        return 2
    return run(given)
