"""The command line that the studies of saved sums share."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from pathlib import Path

from experiments.studies.sums import Sums
from experiments.tasks import RESULTS

SIZES = ("subsets", "seeds", "queries", "runs")


def parser(description: str | None, tasks: Collection[str], work: str) -> argparse.ArgumentParser:
    """Tasks, sizes and folders.

    Args:
        description: the docstring of the study.
        tasks: the names of all.
        work: the folder for trainings.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    listed = f"of {', '.join(tasks)}, or all"
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=listed)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", help="of each training and attribution, such as 40GiB")
    parser.add_argument("--quick", action="store_true", help="the small version of the tasks")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="default: that of the task")
    parser.add_argument("--work", type=Path, default=Path(work), help="for trainings")
    parser.add_argument("--out", type=Path, default=Path(work, "sums"), help="for sums")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--no-rows", action="store_true", help="save sums only")
    return parser


def parsed(parser: argparse.ArgumentParser, tasks: Collection[str]) -> argparse.Namespace:
    """The options; refuses tasks that there are not."""
    options = parser.parse_args()
    if options.tasks == ["all"]:
        options.tasks = list(tasks)
    unknown = set(options.tasks) - set(tasks)
    if unknown:
        parser.error(f"no task is called {', '.join(sorted(unknown))}: see --help")
    return options


def parsed_or_saved(parser: argparse.ArgumentParser, tasks: Collection[str]) -> argparse.Namespace:
    """The same, of some tasks or of sums that were saved before."""
    parser.add_argument("--from", dest="saved", type=Path, help="rows from the sums in this folder")
    options = parsed(parser, tasks)
    if not options.tasks and options.saved is None:
        parser.error("name a task, or a folder of saved sums with --from")
    return options


def saved_sums(options: argparse.Namespace) -> Iterator[Path]:
    """The files of sums of these tasks, or of all."""
    for path in sorted(options.saved.rglob("*.npz")):
        if not options.tasks or Sums.load(path).protocol.task in options.tasks:
            yield path
