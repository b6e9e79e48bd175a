"""Per-example gradients of all tracked layers as one long vector, from plain autograd.

The order of the numbers is the library's (a layer's matrix row by row, its bias as a last column, a
kernel as (row, column, channel)), so that a projection matrix can be laid beside them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

import whence
from support import dense


class Flat:
    """One run of a study, without any of the library's captures."""

    def __init__(self, study: whence.Study) -> None:
        run = study.runs[0]
        actual = study.passes(run, device=torch.device("cpu"), dtype=torch.float64, quiet=True)
        self.study = study
        self.sites = actual[study.stages[-1]].tracked.layers
        self.blocks = {b.name: b for site in self.sites for b in site.blocks}

    def gradients(
        self, checkpoint: Any, quantity: str, dataset: Any, stage: str | None = None
    ) -> Tensor:
        """∇ of task.losses or task.measurements, (n, p)."""
        stage = stage or self.study.stages[-1]
        model, task = copy.deepcopy(self.study.models[stage]).double().eval(), None
        model.load_state_dict(checkpoint.weights())
        task = self.study.tasks[stage]
        rows = []
        for batch in dense.examples(dataset):
            value = getattr(task, quantity)(task.outputs(model, batch), batch).sum()
            rows.append(self._row(model, value))
        return torch.stack(rows)

    def columns(self, checkpoint: Any, dataset: Any) -> Tensor:
        """Columns of the Gauss-Newton matrix's factor, (columns, p): H = CᵀC / n."""
        model = copy.deepcopy(self.study.model).double().eval()
        model.load_state_dict(checkpoint.weights())
        task, rows = self.study.tasks[self.study.stages[-1]], []
        for batch in dense.examples(dataset):
            outputs = task.outputs(model, batch)
            values, vectors = torch.linalg.eigh(dense.loss_hessian(task, outputs.detach(), batch))
            for column in (vectors * values.clamp_min(0).sqrt()).T:
                rows.append(self._row(model, (outputs.flatten() * column).sum()))
        return torch.stack(rows)

    def _row(self, model: Any, value: Tensor) -> Tensor:
        parameters = [p for p in model.parameters() if p.requires_grad]
        actual = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        of = {
            id(p): torch.zeros_like(p) if g is None else g
            for p, g in zip(parameters, actual, strict=True)
        }
        parts = []
        for site in self.sites:
            named = {k: model.get_parameter(k) for k in site.parameter_names()}
            matrices = site.matrices({k: of[id(p)] for k, p in named.items()})
            parts += [m.flatten() for m in matrices]
        return torch.cat(parts)
