"""SOURCE with the coupling of layers measured, instead of taken from traces.

    c_ℓ = Σ_x ⟨M_ℓ y_ℓ, (M y)_ℓ⟩ / Σ_x ‖M_ℓ y_ℓ‖²          y = D^½ x,  M = D^½ H D^½

x are gradients of a few training examples, M is the matrix of all layers together, and M_ℓ its
approximation in one layer. Where the layers' kernels are proportional, it is the ratio of traces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import whence
from whence.engine.dynamics import Rates
from whence.engine.queries import Queries
from whence.engine.workspace import Term, Workspace

PROBES = 16


class Probed(whence.Source):
    """`Source` with probed coupling: one more product with the Gauss-Newton matrix."""

    def operator(
        self, workspace: Workspace, term: Term, rates: Rates, resident: int
    ) -> tuple[Any, Any, dict[str, float]]:
        D = workspace.diagonal(rates.applied)
        H = self.curvature_of(workspace, term, rates, resident)
        used = workspace.used(term.stage)
        spread = np.linspace(0, len(used) - 1, min(PROBES, len(used))).astype(int)
        examples = Queries(workspace.study.data[term.stage], term.stage, used[spread])
        u = D * workspace.query_gradients(examples, term.checkpoints, H.bases)
        data = workspace.fit_data([term.stage])
        whole = workspace.gauss_newton(data, term.checkpoints, D, len(spread))
        together = whole.product({name: u.matrix(name) for name in u.values})
        alone = H @ u
        weighted, c = D * alone, {}
        for name in weighted.values:
            along = weighted.matrix(name)
            square = float((along * alone.matrix(name)).sum())
            c[name] = float((along * together[name]).sum()) / square if square > 0 else 1.0
        return H.whitened(D).scaled(c) + rates.shift, D.sqrt(), c
