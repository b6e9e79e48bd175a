"""Scores of one training example, position by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.engine.queries import Readouts
from whence.engine.workspace import LOSS, Term, Workspace
from whence.layers.kind import Places
from whence.world import World


@dataclass(frozen=True)
class Tokens:
    """One example's score, position by position.

    Attributes:
        values: (q, t): what each position of the example did to each query.
        rest: (q,): what cannot be told apart by position (layers after pooling). A row's values and
            its rest add up to the example's score.
    """

    example: int
    values: NDArray[np.floating]
    rest: NDArray[np.floating]


def score_tokens(
    workspace: Workspace,
    terms: list[Term],
    ready: Mapping[int, Readouts],
    stage: str,
    examples: Sequence[int],
) -> list[Tokens]:
    """What each position of some examples of a stage did to each query whose vectors are ready."""
    data, passes = workspace.scored_data(stage), workspace.passes[stage]
    alone = [np.array([e]) for e in dict.fromkeys(examples)]  # so that nothing is padded
    parts: dict[int, dict[int, Tensor]] = {e: {} for e in examples}  # by positions: (q, t)
    for k, readouts in ready.items():
        term = terms[k]
        for checkpoint in term.checkpoints if term.stage == stage else ():
            passes.load(checkpoint)
            for backward in passes.backward_passes(data, alone, LOSS):
                values = parts[int(backward.indices[0])]
                for factors in backward.factors():
                    readout = readouts.get(factors.block.name)
                    if readout is None:
                        continue
                    value = readout.by_position(factors.a, factors.s)[:, 0]
                    if factors.places is not None:
                        value = _placed(value, factors.places)
                    else:  # the same positions in several calls, or no tokens
                        value = value.reshape(len(value), max(1, factors.calls), -1).sum(1)
                        value = value if factors.calls else value.sum(1, keepdim=True)
                    t = value.shape[1]
                    values[t] = values[t] + value if t in values else value
    return [_tokens(example, parts[example]) for example in examples]


def _tokens(example: int, parts: Mapping[int, Tensor]) -> Tokens:
    """The longest axis is the tokens'; layers without it (a pooled head) are the rest."""
    length = max(parts)
    rest = torch.zeros_like(parts[length][:, 0])
    for t, part in parts.items():
        rest = rest if t == length else rest + part.sum(1)
    return Tokens(int(example), parts[length].cpu().numpy(), rest.cpu().numpy())


def _placed(value: Tensor, places: Places) -> Tensor:
    """Numbers (q, t) of one example at the positions they are for, (q, length)."""
    numbers, total = places.numbers[0], value.new_zeros(len(value), places.length)
    return total.index_add_(1, numbers[numbers >= 0], value[:, numbers >= 0])


def shared_tokens(world: World, mine: list[Tokens], examples: Sequence[int]) -> list[Tokens]:
    """The tokens of all examples, of which each rank has its share."""
    tokens = []
    for k, example in enumerate(examples):
        scored = mine[k // world.size] if k % world.size == world.rank else None
        parts = None if scored is None else {"values": scored.values, "rest": scored.rest}
        given = None if parts is None else {n: torch.from_numpy(x) for n, x in parts.items()}
        shared = world.share(given, k % world.size)
        assert shared is not None
        tokens.append(Tokens(int(example), shared["values"].numpy(), shared["rest"].numpy()))
    return tokens
