"""Finding mislabelled examples: are those whose label was changed the most suspicious ones?

Sort the training examples by suspicion, look at the first c of them, and f of the P flipped ones
have been found. Everything follows from these two counts at each distinct suspicion:

    recovery curve   f / P over c / n
    ROC-AUC          area under f / P over (c − f) / (n − P)
    AP               Σ Δ(f / P) · f / c
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whence.errors import InvalidInput
from whence.evaluate.groups import Floats, columns
from whence.evaluate.plots import StrPath, plot_mislabeled
from whence.scores import Scores
from whence.table import Table, Tabled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE_SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)  # shares of the data, for the table


@dataclass(frozen=True, eq=False, repr=False)
class Mislabeled(Tabled):
    """How well a suspicion finds the examples whose label was changed.

    Attributes:
        roc_auc: the probability that a flipped example is more suspicious than another; 0.5 for
            random scores.
        average_precision: as scikit-learn's; for random scores, the share of flipped examples.
        found: (n + 1,) share of the flipped examples among the 0, 1, ..., n most suspicious.
            Examples of equal suspicion count as if in random order.
        flipped: the number of flipped examples.
        suspicion: (n,) what the examples were sorted by; higher is more suspicious.
        method: the name of the method.
    """

    roc_auc: float
    average_precision: float
    found: Floats
    flipped: int
    suspicion: Floats
    method: str

    @property
    def examples(self) -> int:
        """How many examples there are, n."""
        return len(self.suspicion)

    def found_after(self, share: float) -> float:
        """Share of the flipped examples that are found by checking ``share`` of the data."""
        if not 0 <= share <= 1:
            raise InvalidInput(f"share={share}: it must be between 0 and 1")
        return float(np.interp(share * self.examples, np.arange(self.examples + 1), self.found))

    def plot(self, *, title: str | None = None, path: StrPath | None = None) -> Figure:
        """The share of wrong labels found: `plot_mislabeled`."""
        return plot_mislabeled({self.method: self}, title=title, path=path)

    def table(self) -> Table:
        """The three measures."""
        recovery = ", ".join(f"{self.found_after(s):.0%} after {s:.0%}" for s in TABLE_SHARES)
        facts = [
            ("ROC-AUC", f"{self.roc_auc:.3f}"),
            ("average precision", f"{self.average_precision:.3f}"),
            ("found", recovery),
            ("flipped", f"{self.flipped} of {self.examples} examples"),
        ]
        return Table(None, facts, title=f"Mislabelled examples by {self.method}")


def mislabeled(
    scores: Scores | NDArray[Any], flipped: ArrayLike, *, stage: str | None = None
) -> Mislabeled:
    """How well scores point out the examples whose labels are wrong.

    Suspicion is, for

    - self-influence Scores (n,): what an example did *for* its own measurement, in the direction in
      which that is better. A wrong label is not what its neighbours suggest: the model has to learn
      it from the example itself.
    - Scores (q, n): the mean *harm* to the queries, which must be labelled rightly.
    - a plain array (n,): the numbers as they are, higher is more suspicious.

    Args:
        flipped: which labels are wrong: booleans (n,), or the numbers of those examples.
        stage: of scores over several stages, whose examples.
    """
    if isinstance(scores, Scores):
        values = scores.values
        if stage is None and scores.stage is not None and len(set(scores.stage)) > 1:
            names = ", ".join(dict.fromkeys(scores.stage))
            raise InvalidInput(f"the scores are about the stages {names}: say which with stage=")
        count = scores.shape[-1]
        if stage is not None and scores.stage is not None:
            count = scores.stage.count(stage)
        sign = 1.0 if scores.higher_is_better else -1.0
        if scores.is_self_influence:
            suspicion = sign * values.astype(np.float64)
        else:
            suspicion = -sign * values.mean(0, dtype=np.float64)
        suspicion = suspicion[columns(scores, stage, count, "mislabeled")]
        method = f"{scores.method}, {'self-influence' if scores.is_self_influence else 'mean harm'}"
    else:
        suspicion, method = np.asarray(scores, dtype=np.float64), "an array of suspicions"
        if suspicion.ndim != 1:
            raise InvalidInput(
                f"an array of suspicions must be (n,), not of shape {suspicion.shape}: reduce it "
                "to one number per training example, higher is more suspicious"
            )
    bad = ~np.isfinite(suspicion)
    if bad.any():
        raise InvalidInput(
            f"{int(bad.sum())} examples have a suspicion that is not a finite number, the first is "
            f"{int(bad.argmax())}: they cannot be sorted"
        )
    wrong = _mask(flipped, len(suspicion))
    total = int(wrong.sum())
    if total in (0, len(wrong)):
        counted = "no example is" if total == 0 else "all examples are"
        raise InvalidInput(f"{counted} flipped: there is nothing to tell apart")
    order = np.argsort(-suspicion, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(suspicion[order]) != 0, True)) + 1
    c = np.append(0, ends)
    f = np.append(0, np.cumsum(wrong[order])[ends - 1])
    area = np.trapezoid(f, c - f) / (total * (len(wrong) - total))
    return Mislabeled(
        roc_auc=float(area),
        average_precision=float((np.diff(f) * f[1:] / c[1:]).sum() / total),
        found=np.interp(np.arange(len(wrong) + 1), c, f) / total,
        flipped=total,
        suspicion=suspicion,
        method=method,
    )


def _mask(flipped: ArrayLike, count: int) -> NDArray[np.bool_]:
    """Which examples are flipped, (n,), from such a mask or from their numbers."""
    given = np.asarray(flipped)
    if given.dtype == bool:
        if given.shape != (count,):
            raise InvalidInput(
                f"flipped is a mask of shape {given.shape}, but there are {count} examples: give "
                f"one boolean for each, or the numbers of the flipped ones"
            )
        return given
    if given.size and (given.dtype.kind not in "iu" or given.ndim != 1):
        raise InvalidInput(
            f"flipped is {given.dtype} of shape {given.shape}: give booleans ({count},), or the "
            "numbers of the flipped examples"
        )
    mask = np.zeros(count, dtype=bool)
    if given.size:
        if given.min() < 0 or given.max() >= count:
            raise InvalidInput(
                f"flipped names examples from {given.min()} to {given.max()}, but there are "
                f"{count}: numbers go from 0 to {count - 1}"
            )
        mask[given] = True
        if mask.sum() != len(given):
            raise InvalidInput(
                "flipped names an example more than once: give each number once; a mask of 0 and 1 "
                "must be of booleans (flipped.astype(bool))"
            )
    return mask
