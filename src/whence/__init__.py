"""whence: where in its training data does a model's behaviour come from?"""

from whence import evaluate, layers, report, retrain
from whence.methods import (
    Downsampling,
    FastSource,
    Hydra,
    Influence,
    LeaveOneOut,
    Random,
    RepSim,
    Source,
    TracIn,
    Trak,
    Unrolled,
)
from whence.recipe import Recipe
from whence.run import Recorder, Run
from whence.scores import Scores
from whence.store import GradientStore
from whence.study import Study
from whence.task import Classification, LanguageModeling, Regression, Task

__version__ = "0.1.0"

__all__ = [
    "Classification",
    "Downsampling",
    "FastSource",
    "GradientStore",
    "Hydra",
    "Influence",
    "LanguageModeling",
    "LeaveOneOut",
    "Random",
    "Recipe",
    "Recorder",
    "Regression",
    "RepSim",
    "Run",
    "Scores",
    "Source",
    "Study",
    "Task",
    "TracIn",
    "Trak",
    "Unrolled",
    "evaluate",
    "layers",
    "report",
    "retrain",
]
