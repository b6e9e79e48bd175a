"""The methods of the experiments by their names in tables and result files.

This is the only place in `experiments/` that constructs a method, apart from the table of forms
(`experiments.tasks.forms`): each table maps a name to the settings behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import whence
from experiments.rivals.astra import AstraInfluence, AstraSource
from experiments.rivals.projections import LoGra, SparseTrak

FLOOR = 0.1  # under the roots of Adam's second moments
# Appendix C for every optimizer, layers apart, the query gradient at the final model.
UNCOUPLED: Mapping[str, Any] = {"coupling": False, "query_at": "final", "curvature": "ekfac"}


@dataclass(frozen=True)
class MethodSettings:
    """What a method takes from its task.

    Attributes:
        segments: L of SOURCE.
        stage: whose training data is attributed to.
        trak_dimension: dimension of TRAK's projection.
    """

    segments: int
    stage: str | None
    trak_dimension: int


def uncoupled(segments: int, stage: str | None, **settings: Any) -> whence.Source:
    """SOURCE with the exact form for Adam, and nothing else that the paper does not have."""
    return whence.Source(segments=segments, stage=stage, **{**UNCOUPLED, **settings})


METHODS: Mapping[str, Callable[[MethodSettings], Any]] = {
    "SOURCE": lambda s: whence.Source.published(segments=s.segments, stage=s.stage),
    "SOURCE, L = 1": lambda s: whence.Source.published(segments=1, stage=s.stage),
    "FastSource": lambda s: whence.FastSource.published(segments=s.segments, stage=s.stage),
    "SOURCE, exact": lambda s: uncoupled(s.segments, s.stage, floor=0.0),
    "SOURCE, exact, L = 1": lambda s: uncoupled(1, s.stage, floor=0.0),
    "SOURCE, exact, floor": lambda s: uncoupled(s.segments, s.stage, floor=FLOOR),
    "SOURCE, exact, floor, L = 1": lambda s: uncoupled(1, s.stage, floor=FLOOR),
    "SOURCE, Gauss-Newton": lambda s: uncoupled(
        s.segments, s.stage, floor=0.0, curvature="gauss-newton"
    ),
    "SOURCE, Gauss-Newton, floor": lambda s: uncoupled(
        s.segments, s.stage, floor=FLOOR, curvature="gauss-newton"
    ),
    "influence": lambda s: whence.Influence.published(stage=s.stage),
    'influence (λ = "source")': lambda s: whence.Influence.published(
        damping="source", stage=s.stage
    ),
    "influence, Arnoldi": lambda s: whence.Influence(
        damping="source", solver="arnoldi", stage=s.stage
    ),
    "influence, conjugate gradients": lambda s: whence.Influence(solver="cg", stage=s.stage),
    "DataInf": lambda s: whence.Influence(solver="datainf", stage=s.stage),
    "TracIn": lambda s: whence.TracIn(stage=s.stage),
    "TRAK": lambda s: whence.Trak(s.trak_dimension, stage=s.stage),
    "RepSim": lambda s: whence.RepSim(stage=s.stage),
    "HYDRA": lambda s: whence.Hydra(stage=s.stage),
    "Unrolled": lambda s: whence.Unrolled(stage=s.stage),
    "Unrolled, expected, Gauss-Newton": lambda s: whence.Unrolled(
        curvature="gauss-newton", expected=True, curvature_batch=512, stage=s.stage
    ),
    "Random": lambda s: whence.Random(stage=s.stage),
    "TrackStar": lambda s: whence.TrackStar(s.trak_dimension, stage=s.stage),
    "ASTRA-IF": lambda s: AstraInfluence(stage=s.stage),
    "ASTRA-SOURCE": lambda s: AstraSource(segments=s.segments, stage=s.stage),
    "LoGra": lambda s: LoGra(s.trak_dimension, stage=s.stage),
    "LoGra, random": lambda s: LoGra(s.trak_dimension, "random", stage=s.stage),
    "SJLT TRAK": lambda s: SparseTrak(s.trak_dimension, stage=s.stage),
    "GraSS TRAK": lambda s: SparseTrak(s.trak_dimension, stage=s.stage, share=0.1),
}

# How the pages write the forms of SOURCE for Adam.
ARGUMENTS = {
    "SOURCE, exact": "coupling=False, query_at='final', floor=0",
    "SOURCE, exact, floor": f"coupling=False, query_at='final', floor={FLOOR}",
}

# For linear models at their optimum (`experiments.engine.optimum`).
AT_OPTIMUM: Mapping[str, Callable[[], Any]] = {
    "influence": lambda: whence.Influence.published(fisher="exact"),
    "influence, conjugate gradients": lambda: whence.Influence(damping=1e-8, solver="cg"),
}

# For the figure of two weights (`experiments.pages.figures`), given the number of examples.
TWO_WEIGHTS: Mapping[str, Callable[[int], Any]] = {
    "influence": lambda n: whence.Influence.published(damping=1e-8, fisher="exact"),
    "SOURCE": lambda n: whence.Source.published(segments=3, fisher="exact"),
    "unrolling": lambda n: whence.Unrolled(expected=True, curvature_batch=n),
}


def build_method(name: str, settings: MethodSettings) -> Any:
    """A method by its name."""
    if name not in METHODS:
        raise ValueError(f"no method is called {name!r}: choose from {', '.join(METHODS)}")
    return METHODS[name](settings)


# --- which methods a task is judged on; the order is that of tables and figures -------------------

PAPER = ("RepSim", "TracIn", "TRAK", "influence", "FastSource", "SOURCE, L = 1", "SOURCE")
TWO_STAGES = tuple(name for name in PAPER if name != "SOURCE, L = 1")  # segments end with stages
# With Adam, the paper's damping of 1e-8 is small in SOURCE's preconditioned form. Alternatives:
ADAM_FORMS = ("SOURCE, exact",)
FLOORED = tuple(f"{name}, floor" for name in ADAM_FORMS)
ONE_SEGMENT = ("SOURCE, exact, L = 1", "SOURCE, exact, floor, L = 1")
ADAM = (*PAPER, *ADAM_FORMS, *FLOORED)
EXTENDED = (*PAPER, 'influence (λ = "source")', "DataInf", "Random")
EXPENSIVE = (
    "HYDRA",
    "Unrolled",
    "Unrolled, expected, Gauss-Newton",
    "influence, conjugate gradients",
    "influence, Arnoldi",
)
GAUSS_NEWTON = "SOURCE, Gauss-Newton"  # the full matrix, over all layers
LINEAR = ("TracIn", "influence", "SOURCE, L = 1")
ONE_RUN_EACH = dict.fromkeys((*ADAM_FORMS, *FLOORED), 1)  # they take long on language models
# An inverse at a damping of 1e-8 amplifies TF32's rounding: `experiments.studies.rounding`
# measures by how much. Methods whose products stay in float32:
FLOAT32 = ("influence",)
FLOAT32_ADAM = ("influence", "FastSource", "SOURCE, L = 1", "SOURCE")
