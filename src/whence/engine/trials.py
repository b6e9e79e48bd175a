"""Model and task, tried on every example: one forward pass at a checkpoint.

Factors, scores and stored gradients are reused only where the losses of all examples are what they
were. A forward pass is cheap compared with a wrong result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.data import Batches, cut
from whence.errors import examples_of
from whence.layers.passes import Passes, Weights, rounded_products
from whence.persist.cache import FactorCache, Tried, Version, tolerance
from whence.task import Task
from whence.world import World

LOSSES, MEASUREMENTS, OUTPUTS = "losses", "measurements", "outputs"


@dataclass
class Trials:
    """Losses, measurements or outputs of whole datasets, each computed once.

    Args:
        passes: of each stage.
    """

    passes: Mapping[str, Passes]
    batch_size: int
    world: World = field(default_factory=World)
    _values: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    _tokens: dict[tuple[tuple[str, ...], bool], str] = field(default_factory=dict)
    _reserved: dict[tuple[str, str], tuple[Batches, Version]] = field(default_factory=dict)

    def __call__(self, stage: str, data: Batches, checkpoint: Weights, what: str) -> Tried:
        """The values that a stage's model and task compute for the data at these weights."""
        passes = self.passes[stage]
        place = stage, data.fingerprint(), checkpoint.sha256, what
        if place not in self._values:
            with passes.clock("trial"):
                self._values[place] = self._try(passes, data, checkpoint, what)
        name = f"{what} of {data.name}, step {checkpoint.step}"
        return Tried({name: self._values[place]}, self._tolerance(stage))

    def _tolerance(self, stage: str) -> float:
        passes = self.passes[stage]
        return tolerance(passes.dtype, not rounded_products(passes.dtype, passes.device))

    def version(
        self,
        stage: str,
        data: Batches,
        checkpoint: Weights,
        what: str,
        cache: FactorCache,
        observed: bool = False,
    ) -> str:
        """The token of these values in the cache, the same for all that agree with them.

        Args:
            observed: whether the passes that follow will show the values, so that the first ones
                need no pass of their own. There is nothing to compare them with.
        """
        passes = self.passes[stage]
        place = stage, data.fingerprint(), checkpoint.sha256, what, passes.arithmetic
        if (place, observed) in self._tokens:
            return self._tokens[place, observed]
        version, settings = None, {"place": place}
        if observed and self.world.size == 1 and place[:4] not in self._values:
            version = Version.reserved(cache, settings, len(data), self._tolerance(stage))
        if version is not None:
            self._reserved[stage, checkpoint.sha256] = data, version
            passes.observe = partial(self._observe, stage)
        else:
            tried = self(stage, data, checkpoint, what)
            (values,) = tried.values.values()
            expected, version = self._reserved.get((stage, checkpoint.sha256), (None, None))
            if version is not None and expected is data and what == LOSSES:
                version.add(torch.arange(len(data)), values)
            else:
                version = Version.of(cache, settings, values, tried.tolerance)
        self._tokens[place, observed] = version.token
        return version.token

    def _observe(
        self, stage: str, data: Batches, indices: np.ndarray, outputs: Tensor, batch: Any
    ) -> None:
        passes = self.passes[stage]
        expected, version = self._reserved.get((stage, passes.sha256), (None, None))
        where = torch.from_numpy(np.asarray(indices, np.int64))
        if version is not None and expected is data and not bool(version.seen[where].all()):
            with torch.no_grad():
                version.add(where, _rows(passes.task, outputs, batch, LOSSES))

    def _try(self, passes: Passes, data: Batches, checkpoint: Weights, what: str) -> Tensor:
        passes.load(checkpoint)
        share, rows = self.world.deal(np.arange(len(data))), []
        blocks = [share[block] for block in cut(len(share), self.batch_size)]
        with torch.no_grad():
            for block, batch in data.stream(blocks, passes.device, passes.dtype, passes.workers):
                with examples_of(data.name, block):
                    outputs = passes.task.outputs(passes.model, batch)
                    rows.append(_rows(passes.task, outputs, batch, what))
        return self.world.regather(torch.cat(rows).cpu(), len(data))


def _rows(task: Task, outputs: Tensor, batch: Any, what: str) -> Tensor:
    """Losses or measurements, root mean square and maximum of the outputs, (n, 3)."""
    flat = outputs.reshape(len(outputs), -1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    size = torch.linalg.vector_norm(flat, dim=1, dtype=wide) / flat.shape[1] ** 0.5
    least, most = flat.aminmax(dim=1)
    values = size if what == OUTPUTS else getattr(task, what)(outputs, batch).to(wide)
    return torch.stack([values, size, torch.maximum(most, -least).to(wide)], 1)


def together(tried: list[Tried]) -> Tried:
    """Several trials as one."""
    values = {name: value for each in tried for name, value in each.values.items()}
    return Tried(values, max(each.tolerance for each in tried))
