"""whence: where in its training data does a model's behaviour come from?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from whence import errors, evaluate, layers, report, retrain
    from whence.data import Contrast
    from whence.documents import completion, group, padded, preference, unpacked
    from whence.errors import WhenceError
    from whence.language import LanguageModeling, Preference
    from whence.methods import (
        BM25,
        LESS,
        Best,
        Downsampling,
        FastSource,
        GradientCosine,
        GradientNorm,
        Hydra,
        Influence,
        LeaveOneOut,
        Random,
        RepSim,
        Source,
        TracIn,
        TrackStar,
        Trak,
        Unrolled,
    )
    from whence.retrain.recipe import Recipe
    from whence.run import Recorder, Run
    from whence.scores import Scores
    from whence.sets import Augmented, Averaged, Ranking, RowSet
    from whence.store import GradientStore
    from whence.study import Study
    from whence.task import Classification, MultiLabel, Regression, Task

# Where each name lives. They are imported when they are first used: `whence --help` must not wait
# for torch.
_HOMES = {
    "whence.documents": ("completion", "group", "padded", "preference", "unpacked"),
    "whence.data": ("Contrast",),
    "whence.errors": ("WhenceError",),
    "whence.language": ("LanguageModeling", "Preference"),
    "whence.methods": (
        "BM25",
        "LESS",
        "Best",
        "Downsampling",
        "FastSource",
        "GradientCosine",
        "GradientNorm",
        "Hydra",
        "Influence",
        "LeaveOneOut",
        "Random",
        "RepSim",
        "Source",
        "TracIn",
        "TrackStar",
        "Trak",
        "Unrolled",
    ),
    "whence.retrain.recipe": ("Recipe",),
    "whence.run": ("Recorder", "Run"),
    "whence.scores": ("Scores",),
    "whence.sets": ("Augmented", "Averaged", "Ranking", "RowSet"),
    "whence.store": ("GradientStore",),
    "whence.study": ("Study",),
    "whence.task": ("Classification", "MultiLabel", "Regression", "Task"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BM25",
    "LESS",
    "Augmented",
    "Averaged",
    "Best",
    "Classification",
    "Contrast",
    "Downsampling",
    "FastSource",
    "GradientCosine",
    "GradientNorm",
    "GradientStore",
    "Hydra",
    "Influence",
    "LanguageModeling",
    "LeaveOneOut",
    "MultiLabel",
    "Preference",
    "Random",
    "Ranking",
    "Recipe",
    "Recorder",
    "Regression",
    "RepSim",
    "RowSet",
    "Run",
    "Scores",
    "Source",
    "Study",
    "Task",
    "TracIn",
    "TrackStar",
    "Trak",
    "Unrolled",
    "WhenceError",
    "completion",
    "errors",
    "evaluate",
    "group",
    "layers",
    "padded",
    "preference",
    "report",
    "retrain",
    "unpacked",
]


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package (`whence.run`), at its first use."""
    if name in _HOME:
        globals()[name] = value = getattr(import_module(_HOME[name]), name)
        return value
    try:
        return import_module(f"whence.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"whence.{name}":
            raise
        raise AttributeError(f"module 'whence' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
