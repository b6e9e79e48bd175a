"""Choosers for `Study(layers=...)`.

A chooser receives all trackable layers, {name: module}, and returns the names of those to track.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from whence.errors import InvalidInput
from whence.layers.kind import kind_of

Chooser = Callable[[Mapping[str, nn.Module]], Collection[str]]
_NUMBERED = re.compile(r"^(.*?)\.?(\d+)\.")


def chooser(layers: Sequence[str] | str | Chooser | None) -> Chooser | None:
    """The chooser that `Study(layers=...)` asks for; None leaves it to the method."""
    if layers is None or callable(layers):
        return layers
    names = [layers] if isinstance(layers, str) else list(layers)
    return NAMED[names[0]] if len(names) == 1 and names[0] in NAMED else by_name(names)


def everything(layers: Mapping[str, nn.Module]) -> set[str]:
    """All layers: embeddings, norms and tied heads too."""
    return set(layers)


def matrices(layers: Mapping[str, nn.Module]) -> set[str]:
    """Layers whose weight is a matrix: linear ones and convolutions, as in the paper."""
    kinds = {name: kind_of(module) for name, module in layers.items()}
    return {
        name
        for name, kind in kinds.items()
        if kind is not None and kind.form == "matrix" and kind.seen == "call"
    }


def by_name(patterns: Sequence[str]) -> Chooser:
    """Layers whose names match one of these shell patterns ("blocks.*.mlp.*", "*.ln_1")."""

    def choose(layers: Mapping[str, nn.Module]) -> set[str]:
        matches = {p: {n for n in layers if fnmatchcase(n, p)} for p in patterns}
        unmatched = sorted(p for p, names in matches.items() if not names)
        if unmatched:
            known = ", ".join(name or "(model)" for name in layers)
            raise InvalidInput(f"layers={unmatched} match no layer: the model has {known}")
        return set().union(*matches.values())

    return choose


def by_type(*types: type[nn.Module]) -> Chooser:
    """Layers of these classes."""
    return lambda layers: {name for name, module in layers.items() if isinstance(module, types)}


def mlp_only(layers: Mapping[str, nn.Module]) -> set[str]:
    """Linear layers inside the numbered blocks of a transformer, except attention layers."""
    inside = {n for n in matrices(layers) if _NUMBERED.match(n)}
    return {n for n in inside if not re.search("attn|attention", n.lower())}


def last_blocks(count: int) -> Chooser:
    """Linear layers and convolutions of the last `count` of a model's numbered blocks ("h.10.*",
    "h.11.*"), and all after.

    The blocks are those of the container that has the most.
    """
    if count < 1:
        raise InvalidInput(f"last_blocks({count}): choose at least one")

    def choose(trackable: Mapping[str, nn.Module]) -> set[str]:
        layers = [name for name in trackable if name in matrices(trackable)]
        places = {n: (m[1], int(m[2])) for n in layers if (m := _NUMBERED.match(n))}
        if not places:
            raise InvalidInput("last_blocks: no layer is in a numbered block (such as 'h.11.mlp')")
        numbers: dict[str, set[int]] = {}
        for container, number in places.values():
            numbers.setdefault(container, set()).add(number)
        container = max(numbers, key=lambda c: len(numbers[c]))
        chosen = set(sorted(numbers[container])[-count:])
        names = list(layers)
        last = max(names.index(n) for n, (c, _) in places.items() if c == container)
        inside = {n for n, (c, number) in places.items() if c == container and number in chosen}
        return inside | set(names[last + 1 :])

    return choose


NAMED: dict[str, Chooser] = {"all": everything, "matrices": matrices}
