"""SOURCE for Adam-type optimizers without iterations: M = D^½ H D^½ in closed form.

It leaves out what M has off the diagonal in its eigenbases, which `Source` keeps by its Lanczos
iterations. Functions of it cost what those of H do.
"""

from __future__ import annotations

from typing import Any

import whence
from whence.engine.dynamics import Rates
from whence.engine.workspace import Term, Workspace
from whence.operators import coupling


class ClosedForm(whence.Source):
    """`Source` with M in closed form for Adam, AdamW and RMSprop."""

    def operator(
        self, workspace: Workspace, term: Term, rates: Rates, resident: int
    ) -> tuple[Any, Any, dict[str, float]]:
        D = rates.applied
        H: Any = self.curvature_of(workspace, term, rates, resident if D.scalar else 2 * resident)
        M = H.whitened_in_closed_form(D)
        c = coupling(M) if self.coupling else {}
        return M.scaled(c) + rates.shift, D.sqrt(), c
