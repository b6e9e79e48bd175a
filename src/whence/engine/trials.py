"""Model and task, tried on every example: one forward pass at a checkpoint.

Factors, scores and stored gradients are reused only where the losses of all examples are what they
were. A forward pass is cheap compared with what it protects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whence.data import Batches, cut
from whence.layers.passes import Passes, Weights, rounded_products
from whence.persist.tensors import FactorCache
from whence.persist.tried import Tried, tolerance

LOSSES, MEASUREMENTS, OUTPUTS = "losses", "measurements", "outputs"


@dataclass
class Trials:
    """Losses, measurements or outputs of whole datasets, each computed once.

    Args:
        passes: of each stage.
    """

    passes: Mapping[str, Passes]
    batch_size: int
    _values: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    _versions: dict[tuple[str, ...], str] = field(default_factory=dict)

    def __call__(self, stage: str, data: Batches, checkpoint: Weights, what: str) -> Tried:
        """What a stage's model and task make of the data at these weights."""
        passes = self.passes[stage]
        place = stage, data.fingerprint(), checkpoint.sha256, what
        if place not in self._values:
            with passes.clock("trial"):
                self._values[place] = self._try(passes, data, checkpoint, what)
        exact = not rounded_products(passes.dtype, passes.device)
        name = f"{what} of {data.name}, step {checkpoint.step}"
        return Tried({name: self._values[place]}, tolerance(passes.dtype, exact))

    def version(
        self, stage: str, data: Batches, checkpoint: Weights, what: str, cache: FactorCache
    ) -> str:
        """The digest of these values, or of those in the cache that agree with them."""
        place = stage, data.fingerprint(), checkpoint.sha256, what, self.passes[stage].arithmetic
        if place not in self._versions:
            tried = self(stage, data, checkpoint, what)
            self._versions[place] = tried.version(cache, {"place": place})
        return self._versions[place]

    def _try(self, passes: Passes, data: Batches, checkpoint: Weights, what: str) -> Tensor:
        passes.load(checkpoint)
        blocks, rows = cut(len(data), self.batch_size), []
        with torch.no_grad():
            for _, batch in data.stream(blocks, passes.device, passes.dtype, passes.workers):
                outputs = passes.task.outputs(passes.model, batch)
                flat = outputs.reshape(len(outputs), -1)
                wide = torch.promote_types(flat.dtype, torch.float32)
                size = torch.linalg.vector_norm(flat, dim=1, dtype=wide) / flat.shape[1] ** 0.5
                most = torch.linalg.vector_norm(flat, float("inf"), dim=1, dtype=wide)
                values = size
                if what != OUTPUTS:
                    values = getattr(passes.task, what)(outputs, batch).to(wide)
                rows.append(torch.stack([values, size, most], 1).cpu())
        return torch.cat(rows)


def together(tried: list[Tried]) -> Tried:
    """Several trials as one."""
    values = {name: value for each in tried for name, value in each.values.items()}
    return Tried(values, max(each.tolerance for each in tried))
