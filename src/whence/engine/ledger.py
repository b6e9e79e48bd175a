"""Diagnostics that a calculation collects, and that are stored with its scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import collected_warnings, warn
from whence.persist.files import check_types, parsing
from whence.run import Segment
from whence.scores.writer import merged
from whence.world import World

SATURATED_SURVIVAL = 1e-6  # share of ‖v‖² below which nothing is left of what came before a segment
ENERGY_LOSS_LIMIT = 0.05  # share of a query vector's energy that factors may lose without a warning
SENSITIVITY_LIMIT = 0.3  # share of a score vector that may depend on the damping before a warning
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
MOST_NUMBERS = 2**26  # that quantiles are taken of
KINDS = {"magnitudes": list, "warnings": list, "query_rank": int}  # of tallies; others: dict
NUMBER = (int, float)
ENTRIES: dict[str, dict[str, Any]] = {  # what each set of queries notes
    "solver": dict.fromkeys(("queries", "unconverged", "iterations", "residual"), NUMBER),
    "query_factors": {"layers": dict}
    | dict.fromkeys(("rank", "queries", "lost", "most", "above"), NUMBER),
}


@dataclass
class Ledger:
    """Diagnostics of one calculation.

    Attributes:
        diagnostics: facts that are known before scores are computed.
        tallies: plain values that are added up block by block. They are kept with the progress of
            the scores, so that a resumed call has the same.
    """

    diagnostics: dict[str, Any] = field(default_factory=dict)
    tallies: dict[str, Any] = field(default_factory=dict)
    _norms: dict[int, Tensor] = field(default_factory=dict)  # of some blocks, (2, q), by segment

    def restore(self, tallies: dict[str, Any], file: Path | None) -> None:
        """Continue with the tallies of an interrupted call, which were read from a file. Refuses
        those that no call writes."""
        self.tallies = tallies
        if file is None or not tallies:
            return
        with parsing(file, f"delete the folder {file.parent} to start over"):
            check_types(tallies, **{name: KINDS.get(name, dict) for name in tallies})
            for name, value in tallies.items():
                _check_leaves(value, str if name == "warnings" else NUMBER)
            for name, keys in ENTRIES.items():
                for entry in tallies.get(name, {}).values():
                    check_types(entry, **keys)

    def note_survival(self, segment: int, after: Tensor, before: Tensor, more: bool) -> None:
        """Note how much of ‖v‖² survives a segment, the median over queries; once per segment.

        Args:
            after, before: ‖v‖² of these queries, over some blocks.
            more: whether those over other blocks follow.
        """
        noted = self.tallies.setdefault("survival", {})
        if str(segment) in noted:
            return
        sums = torch.stack([after, before])
        if segment in self._norms:
            sums += self._norms.pop(segment)
        if more:
            self._norms[segment] = sums
            return
        share = sums[0] / sums[1]
        median = noted[str(segment)] = float(share.nanmedian().nan_to_num(1.0))  # 0/0: flat query
        if median < SATURATED_SURVIVAL:
            about = self.diagnostics["segments"][segment]
            warn(
                f"segment {segment + 1} (updates {about['start']}..{about['end']}) is saturated: "
                f"only {median:.1e} of what was learned before survives it, so earlier segments "
                "score about zero. If that surprises you, check that losses() is scaled as in "
                "training (mean or sum over tokens) and that the learning rates are right",
                stacklevel=2,
            )

    def note_solve(
        self, queries: str, statistics: dict[str, Any], most: float | None = None
    ) -> None:
        """Note how these queries were solved; warn the first time that one did not converge.

        Args:
            most: the residual up to which a solve that stopped early needs no warning.
        """
        noted = self.tallies.setdefault("solver", {})
        if most is not None and statistics["residual"] <= most:
            statistics = statistics | {"unconverged": 0}
        if statistics["unconverged"] and not any(s["unconverged"] for s in noted.values()):
            warn(
                f"conjugate gradients have not converged for {statistics['unconverged']} of "
                f"{statistics['queries']} queries (relative residual up to "
                f"{statistics['residual']:.1e} after {statistics['iterations']} iterations): raise "
                "damping, iterations or tolerance, or use dtype=torch.float64",
                stacklevel=2,
            )
        noted[queries] = dict(statistics)

    def note_lost_energy(
        self, queries: str, rank: int, lost: NDArray[np.float64], layers: dict[str, float]
    ) -> None:
        """Note the share of ‖w‖² that the factors of these queries lose, (q,), and by layer."""
        noted = self.tallies.setdefault("query_factors", {})
        if lost.max() > ENERGY_LOSS_LIMIT and not any(s["above"] for s in noted.values()):
            warn(
                f"query_rank={rank} loses {lost.max():.0%} of the energy of a query's vector: "
                "compare a few queries with query_rank=None, or use a larger rank (more memory=)",
                stacklevel=2,
            )
        noted[queries] = {
            "rank": rank,
            "queries": len(lost),
            "lost": float(lost.sum()),
            "most": float(lost.max()),
            "above": int((lost > ENERGY_LOSS_LIMIT).sum()),
            "layers": layers,
        }

    def note_sensitivity(self, name: str, share: float) -> None:
        """Note how far a layer's score vector moves when the damping is ten times larger."""
        self.tallies.setdefault("damping_sensitivity", {}).setdefault(name, share)

    def merge(self, world: World) -> None:
        """Add the tallies and warnings of the other ranks."""
        messages = collected_warnings()
        everywhere = world.values({**self.tallies, "warnings": messages})
        together = reduce(merged, everywhere)
        for message in together["warnings"]:
            if message not in messages:
                warn(message, stacklevel=2)
        self.tallies.update(together | {"warnings": messages})

    def summary(self) -> dict[str, Any]:
        """All diagnostics, including the tallies."""
        sizes = self.tallies.get("magnitudes", [])  # Σ |contribution| of each term
        for k, segment in enumerate(self.diagnostics.get("segments", [])):
            segment["share_of_score"] = sizes[k] / (sum(sizes) or 1.0)
            if str(k) in self.tallies.get("survival", {}):
                segment["survival"] = self.tallies["survival"][str(k)]
        if "lanczos" in self.tallies:
            self.diagnostics["lanczos"] = self.tallies["lanczos"]
        solves = self.tallies.get("solver", {}).values()
        if solves:
            self.diagnostics["solver"] = {
                "queries": sum(s["queries"] for s in solves),
                "unconverged": sum(s["unconverged"] for s in solves),
                "iterations": max(s["iterations"] for s in solves),
                "residual": max(s["residual"] for s in solves),
            }
        noted = list(self.tallies.get("query_factors", {}).values())
        if noted:
            count = sum(s["queries"] for s in noted)
            self.diagnostics["query_factors"] = {
                "rank": noted[0]["rank"],
                "lost_energy": sum(s["lost"] for s in noted) / count,
                "most_lost_energy": max(s["most"] for s in noted),
                "share_of_queries_above_5_percent": sum(s["above"] for s in noted) / count,
                "lost_energy_by_layer": {
                    name: sum(s["layers"][name] * s["queries"] for s in noted) / count
                    for name in noted[0]["layers"]
                },
            }
        if "damping_sensitivity" in self.tallies:
            self._add_sensitivity(self.tallies["damping_sensitivity"])
        return self.diagnostics

    def _add_sensitivity(self, shares: dict[str, float]) -> None:
        self.diagnostics["damping_sensitivity"] = shares
        median = float(np.median(list(shares.values())))
        if median > SENSITIVITY_LIMIT:
            warn(
                f"scores are sensitive to the damping: raising it tenfold changes the median "
                f"layer's score vector by {median:.0%}, so directions of hardly any curvature "
                "dominate it. Compare Source(), which needs no inverse, or a larger damping",
                stacklevel=2,
            )


def _check_leaves(value: Any, kind: type | tuple[type, ...]) -> None:
    """Refuse what is not of this kind, inside lists and dicts."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_leaves(part, kind)
    else:
        check_types({"a value": value}, **{"a value": kind})


def segment_summary(
    segment: Segment | None,
    durations: Mapping[str, float] | None = None,
    exponents: Mapping[str, Tensor] | None = None,
    coupling: dict[str, float] | None = None,
) -> dict[str, Any]:
    """A readable summary of a segment.

    Args:
        durations: η̄K of its layers.
        exponents: η̄K times the curvature as the exponential has it, where it is known.
        coupling: c of each layer.
    """
    assert segment is not None
    about: dict[str, Any] = {
        "start": segment.start,
        "end": segment.end,
        "stage": segment.stage.name,
        "checkpoints": [c.step for c in segment.checkpoints],
    }
    times = list((durations or {}).values())
    if times:
        about["duration"] = {"least": min(times), "most": max(times)}
    if exponents:
        x = _sample(exponents.values())
        places = np.round(np.array(QUANTILES) * (len(x) - 1)).astype(int)
        chosen = np.partition(x, places)[places]  # a sort would take longer
        about["duration_times_eigenvalue"] = {
            f"{level:.2f}": float(value) for level, value in zip(QUANTILES, chosen, strict=True)
        }
    if coupling:
        about["coupling"] = coupling
    return about


def _sample(parts: Iterable[Tensor]) -> NDArray[Any]:
    """All numbers; of more than MOST_NUMBERS, every so many, and the extremes."""
    chosen: list[NDArray[Any]] = []
    extremes: list[float] = []
    every = 1
    for part in parts:
        extremes += [float(part.min()), float(part.max())]
        chosen.append(part.flatten()[::every].cpu().numpy())
        while sum(map(len, chosen)) > MOST_NUMBERS:
            chosen, every = [x[::2].copy() for x in chosen], 2 * every
    ends = [] if every == 1 else [np.array([min(extremes), max(extremes)])]
    return np.concatenate(chosen + ends)
