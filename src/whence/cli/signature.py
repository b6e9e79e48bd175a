"""A command's options are the arguments of its function, described in its docstring:

    Args:
        alpha (SHARE): Fraction of the examples in a subset.

The word in parentheses stands for the value in help. An annotation adds what a docstring cannot
say, such as a short name: `out: Annotated[Path, OUT]`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from typing import Annotated, Any, get_args, get_origin

import typer

OUT = typer.Option("--out", "-o")
QUERY = typer.Option("--query", "-q")
POSITIVE, NON_NEGATIVE = typer.Option(min=1), typer.Option(min=0)
ENTRY = re.compile(r"(\w+)(?: \(([^)]+)\))?: (.+)", re.S)


def documented(function: Callable[..., Any]) -> tuple[str, list[inspect.Parameter]]:
    """The help of a command without its arguments, and the arguments as typer takes them."""
    text, _, described = (inspect.getdoc(function) or "").partition("\n\nArgs:\n    ")
    entries = {}
    for entry in filter(None, re.split(r"\n    (?=\S)", described)):
        match = ENTRY.fullmatch(" ".join(entry.split()))
        assert match is not None, f"{function.__name__}: {entry}"
        entries[match[1]] = (match[2], match[3])
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return text, [_declared(p, *entries.get(p.name, (None, None))) for p in parameters]


def _declared(
    parameter: inspect.Parameter, metavar: str | None, text: str | None
) -> inspect.Parameter:
    kind, info = parameter.annotation, typer.Option()
    if get_origin(kind) is Annotated:
        kind, info = get_args(kind)
    info = copy(info)
    info.help = info.help or text
    info.metavar = info.metavar or metavar or ("INT" if int in (kind, *get_args(kind)) else None)
    names = info.param_decls or info.default is not ...
    if kind is bool and parameter.default is False and not names:
        info.param_decls = ("--" + parameter.name.replace("_", "-"),)  # nothing to switch off
    keyword = inspect.Parameter.KEYWORD_ONLY
    return parameter.replace(kind=keyword, annotation=Annotated[kind, info])
