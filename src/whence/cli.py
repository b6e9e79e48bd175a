"""The command line: a thin shell over the same functions.

whence demo
whence layers runs/mnist --model train:make_model --train train:train_set
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

TASKS = {
    "classification": "Classification",
    "regression": "Regression",
    "language": "LanguageModeling",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `whence` command; what is wrong with the input is said in one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["demo"]:
        from whence.demo import main as demo

        return demo(given[1:])
    options = _parser().parse_args(given)
    from whence.run import RunError  # only now: --help need not wait for torch

    try:
        return int(options.run_command(options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (RunError, ValueError, TypeError, OSError) as error:
        print(f"whence: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="whence", description="Where in its training data does a model's behaviour come from?"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("demo", help="a minute's tour on digits (whence demo --help)")
    layers = commands.add_parser("layers", help="which layers of a run are tracked, and their cost")
    layers.add_argument("run", help="the folder of a recorded run")
    where = "MODULE:NAME of it, or of a function that makes it; modules are found from here"
    layers.add_argument("--model", required=True, help=f"the model: {where}")
    layers.add_argument("--train", required=True, help="the training data, likewise")
    layers.add_argument("--task", choices=sorted(TASKS), default="classification")
    layers.add_argument("--layers", nargs="+", metavar="PATTERN", help="only layers named so")
    layers.set_defaults(run_command=_layers)
    return parser


def _layers(options: argparse.Namespace) -> int:
    import whence

    task = getattr(whence, TASKS[options.task])()
    model, train = _found("--model", options.model), _found("--train", options.train)
    study = whence.Study(model, task, train=train, runs=options.run, layers=options.layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is left out is part of the description
        print(study.describe())
    return 0


def _found(option: str, place: str) -> Any:
    """What `MODULE:NAME` names; called, if it is a function or a class."""
    module, _, name = place.partition(":")
    if not module or not name:
        raise ValueError(f"{option} {place!r}: write MODULE:NAME, such as train:make_model")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} {place!r} cannot be found ({error})") from error
    finally:
        sys.path.remove(os.getcwd())
    plain = hasattr(found, "parameters") or hasattr(found, "__getitem__")
    return found() if callable(found) and (isinstance(found, type) or not plain) else found


if __name__ == "__main__":
    sys.exit(main())
