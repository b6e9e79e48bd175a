"""The forms of SOURCE and influence functions that `experiments.studies.forms` compares.

One table: a name in results and pages, the method behind it, the tasks where it makes sense.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import whence
from experiments.tasks.closed_form import ClosedForm
from experiments.tasks.experiment import Experiment
from experiments.tasks.further import Longer, NoiseAware, Redrawn
from experiments.tasks.measured import Measured
from experiments.tasks.methods import MethodSettings, build_method
from experiments.tasks.probed import Probed
from whence.layers.choose import Chooser, everything, matrices
from whence.layers.kind import kind_of

PUBLISHED, INFLUENCE = "published", "influence, published"
BASELINES = (PUBLISHED, INFLUENCE)  # every form is compared with these
DEFAULT = "coupled, query along the run, L = 1"  # Source(1)
DEFAULT_BY_STAGE = "coupled, query along the run"  # Source(3); of several stages, one for each
BEST = "best"  # Best()
LONGER = {2.0: "response twice as long", 4.0: "response four times as long"}
NOISE_AWARE, REDRAWN = "response of best", "eight runs, seven of them drawn"
MEASURED = {"sides": "measured", "measured": "measured, bases too"}  # by bases
# Defaults were chosen on these tasks: the number of segments on the last three, all else on the
# first three.
CHOSEN_ON = ("digits", "digits_adamw", "fashion_mnist", "cifar10", "rte", "sst2")

SCHEMA = 2  # of results/forms.json
RULE = 2  # of `combine`: weights that are not negative; rows without this number have the former
UNCOUPLED: Mapping[str, Any] = {"coupling": False, "query_at": "final"}


@dataclass(frozen=True)
class Form:
    """A method with its settings.

    Attributes:
        make: builds the method; `segments` is 3, or "stages" for a task of several stages.
        of: whether it makes sense on a task (default: on all).
        most_runs: attribute at most this many runs, where one takes long.
        combined: whether it is an input of `whence.evaluate.combine`.
        layers: the layers that it tracks (default: those of the task).
        over: a form that it is compared with, besides the published ones.
    """

    make: Callable[[MethodSettings], Any]
    of: Callable[[Experiment], bool] = lambda experiment: True
    most_runs: int | None = None
    combined: bool = False
    layers: Chooser | None = None
    over: str | None = None


def one_stage(experiment: Experiment) -> bool:
    return experiment.stage is None


def many_weights(experiment: Experiment) -> bool:
    """More weights than the dimension of TRAK's projection."""
    return experiment.group != "linear"


def small(experiment: Experiment) -> bool:
    """Models that are cheap enough for a product with the whole curvature at every update."""
    return one_stage(experiment) and not experiment.keep_factors


def source(segments: int | None = None, **settings: Any) -> Callable[[MethodSettings], Any]:
    """`Source` with the task's segments, or with this many."""
    return lambda s: whence.Source(segments or s.segments, stage=s.stage, **settings)


def closed(segments: int | None, settings: MethodSettings) -> Any:
    """`Source` without iterations."""
    return ClosedForm(segments or settings.segments, stage=settings.stage)


def measured(segments: int | None, bases: str, settings: MethodSettings) -> Any:
    """`Source` without iterations, measured on whitened gradients."""
    return Measured(segments or settings.segments, stage=settings.stage, bases=bases)


def longer(length: float, settings: MethodSettings) -> Any:
    """`Source` of one segment with a longer response."""
    return Longer(1, stage=settings.stage, length=length)


def adaptive(experiment: Experiment) -> bool:
    """Whether the optimizer has a number for every parameter."""
    return "AdamW" in experiment.setting


def of_form(form: str) -> Chooser:
    """The matrices, and the layers of one more form."""

    def choose(layers: Mapping[str, nn.Module]) -> set[str]:
        kinds = {name: kind_of(module) for name, module in layers.items()}
        more = {name for name, kind in kinds.items() if kind is not None and kind.form == form}
        return matrices(layers) | more

    return choose


LAYERS: Mapping[str, Chooser] = {
    "all layers": everything,
    "embeddings too": of_form("lookup"),
    "norms too": of_form("elementwise"),
}

FORMS: Mapping[str, Form] = {
    INFLUENCE: Form(lambda s: whence.Influence.published(stage=s.stage), combined=True),
    PUBLISHED: Form(lambda s: whence.Source.published(s.segments, stage=s.stage), combined=True),
    "RepSim": Form(lambda s: build_method("RepSim", s)),
    "TracIn": Form(lambda s: build_method("TracIn", s), combined=True),
    "TRAK": Form(lambda s: build_method("TRAK", s), many_weights),
    **{
        name: Form(partial(build_method, name), small, most_runs=1)
        for name in ("influence, conjugate gradients", "ASTRA-IF", "ASTRA-SOURCE")
    },
    **{
        name: Form(partial(build_method, name), many_weights)
        for name in ("LoGra", "SJLT TRAK", "GraSS TRAK", "TrackStar")
    },
    "influence, source damping": Form(
        lambda s: whence.Influence.published("source", stage=s.stage)
    ),
    "influence, coupled": Form(lambda s: whence.Influence(stage=s.stage), combined=True),
    "appendix C": Form(source(**UNCOUPLED)),
    "coupled": Form(source(query_at="final")),
    "query along the run": Form(source(coupling=False)),
    DEFAULT_BY_STAGE: Form(source(), combined=True),
    "published, L = 1": Form(lambda s: whence.Source.published(1, stage=s.stage), one_stage),
    "appendix C, L = 1": Form(source(1, **UNCOUPLED), one_stage),
    "coupled, L = 1": Form(source(1, query_at="final"), one_stage, combined=True),
    DEFAULT: Form(source(1), one_stage, combined=True),
    "coupled by probes, query along the run, L = 1": Form(
        lambda s: Probed(1, stage=s.stage), one_stage
    ),
    **{
        f"{DEFAULT}, {name}": Form(partial(longer, length), one_stage, over=DEFAULT)
        for length, name in LONGER.items()
    },
    f"{DEFAULT}, {NOISE_AWARE}": Form(
        lambda s: NoiseAware(1, stage=s.stage, relative_damping=3.0), one_stage, over=DEFAULT
    ),
    f"{DEFAULT}, {REDRAWN}": Form(
        lambda s: Redrawn(whence.Source(1, stage=s.stage)), one_stage, over=DEFAULT
    ),
    **{
        f"{name}, closed form": Form(partial(closed, segments), adaptive, over=name)
        for name, segments in ((DEFAULT, 1), (DEFAULT_BY_STAGE, None))
    },
    **{
        f"{name}, {MEASURED[bases]}": Form(partial(measured, segments, bases), adaptive, over=name)
        for name, segments in ((DEFAULT, 1), (DEFAULT_BY_STAGE, None))
        for bases in MEASURED
    },
    "coupled, query along the run, K-FAC bases, L = 1": Form(
        source(1, curvature="ekfac"), one_stage
    ),
    BEST: Form(lambda s: whence.Best(stage=s.stage), combined=True),
    "best, L = 3": Form(lambda s: whence.Best(segments=3), one_stage),
    "best, 2 iterations": Form(lambda s: whence.Best(2), small, most_runs=1),
    "best, 4 iterations": Form(lambda s: whence.Best(4), small, most_runs=1),
    "best, 16 iterations": Form(lambda s: whence.Best(16), small, most_runs=1),
    "best, damping 1": Form(lambda s: whence.Best(relative_damping=1.0), small),
    "best, damping 10": Form(lambda s: whence.Best(relative_damping=10.0), small),
    "best, query at the end": Form(lambda s: whence.Best(query_at="final"), small, most_runs=1),
    "expected Gauss-Newton": Form(
        lambda s: whence.Unrolled("gauss-newton", True, damping=1e-3, query_at="run"),
        lambda experiment: experiment.name in ("digits", "concrete"),
        most_runs=1,
    ),
    **{
        f"{DEFAULT_BY_STAGE}, {name}": Form(
            source(), lambda experiment: not small(experiment), layers=layers, over=DEFAULT_BY_STAGE
        )
        for name, layers in LAYERS.items()
    },
    f"{DEFAULT_BY_STAGE}, all layers, measured": Form(
        partial(measured, None, "sides"),
        lambda experiment: adaptive(experiment) and not small(experiment),
        layers=everything,
        over=f"{DEFAULT_BY_STAGE}, all layers",
    ),
    f"{PUBLISHED}, all layers": Form(
        lambda s: whence.Source.published(s.segments, stage=s.stage),
        lambda experiment: not small(experiment),
        layers=everything,
        over=PUBLISHED,
    ),
    f"{INFLUENCE}, all layers": Form(
        lambda s: whence.Influence.published(stage=s.stage),
        lambda experiment: not small(experiment),
        layers=everything,
        over=INFLUENCE,
    ),
    f"{BEST}, all layers": Form(
        lambda s: whence.Best(stage=s.stage),
        lambda experiment: not small(experiment),
        layers=everything,
        over=BEST,
    ),
}


def forms_of(experiment: Experiment) -> dict[str, Form]:
    """The forms that make sense on a task."""
    return {name: form for name, form in FORMS.items() if form.of(experiment)}


def default_of(experiment: Experiment) -> str:
    """The name of the form that `Source()` is on a task: three segments where layers share weights
    over positions, as `methods.gradient.chosen_segments` decides; else one for each stage."""
    plain = one_stage(experiment) and not experiment.keep_factors
    return DEFAULT if plain else DEFAULT_BY_STAGE


def build_form(form: Form, experiment: Experiment, examples: int) -> Any:
    """The method of a form, for a task with this many training examples."""
    segments: Any = 3 if one_stage(experiment) else "stages"
    dimension = min(experiment.trak_dimension, examples)
    return form.make(MethodSettings(segments, experiment.stage, dimension))


def read_results(file: Path) -> dict[str, Any]:
    """The content of forms.json: for each task a list of entries, one for each protocol."""
    if not file.exists():
        return {"schema": SCHEMA, "tasks": {}}
    stored: dict[str, Any] = json.loads(file.read_text())
    if stored.get("schema") != SCHEMA:
        raise ValueError(f"{file} has schema {stored.get('schema')}, not {SCHEMA}: move it")
    return stored
