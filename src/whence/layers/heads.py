"""The heads of attention projections: which rows or columns of a weight belong to which head.

Projections to queries, keys and values have their heads in rows, one after another; so have packed
ones, (3, heads, d). The output projection has its heads in columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whence.layers.kind import TrackedLayer

QUERIES = ("q_proj", "query", "q_lin", "wq", "q")
KEYS = ("k_proj", "key", "k_lin", "wk", "k", "v_proj", "value", "v_lin", "wv", "v")
PACKED = ("c_attn", "in_proj_weight", "qkv")
OUTPUTS = ("o_proj", "out_proj", "c_proj", "out_lin", "wo", "dense", "proj", "o")
COUNTS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True)
class Head:
    """Part of a block: some rows, or some columns; runs of the same length."""

    number: int
    starts: tuple[int, ...]
    length: int
    columns: bool = False

    def take(self, x: Tensor, axis: int) -> Tensor:
        """Its part of an axis."""
        parts = [x.narrow(axis, start, self.length) for start in self.starts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def heads(model: nn.Module, layer: TrackedLayer) -> list[Head]:
    """The heads of a layer; none if it is no attention projection, or if that is not known."""
    if len(layer.blocks) != 1 or layer.blocks[0].rows:
        return []
    block, path = layer.blocks[0], layer.weight.split(".")
    name = path[-1] if path[-1] in PACKED else path[-2] if len(path) > 1 else ""
    owner = path[:-1] if path[-1] in PACKED else path[:-2]
    known = {n: k for k, names in enumerate((QUERIES, KEYS, PACKED, OUTPUTS)) for n in names}
    if name not in known:
        return []
    role = known[name]
    count = next(_counts(model, owner, KEY_COUNTS if role == 1 else ()), 0)
    count = count or next(_counts(model, owner, COUNTS), 0)
    size, runs = (block.i if role == 3 else block.o), 3 if role == 2 else 1
    if count < 2 or size % (runs * count):
        return []
    d = size // (runs * count)
    return [
        Head(h, tuple(run * count * d + h * d for run in range(runs)), d, role == 3)
        for h in range(count)
    ]


def _counts(model: nn.Module, owner: list[str], names: tuple[str, ...]) -> Iterator[int]:
    """What the module around a projection, the modules beside it, or their configs say."""
    module = model.get_submodule(".".join(owner))
    inside = any("attention" in part or "attn" in part for part in owner)  # no MLP beside it
    beside = [model.get_submodule(".".join(owner[:-1]))] if inside else []
    near = [module, *(child for parent in beside for child in parent.children())]
    for neighbour in near:
        if "attention" not in type(neighbour).__name__.lower():
            continue
        for holder in (neighbour, getattr(neighbour, "config", None)):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, int):
                    yield value
