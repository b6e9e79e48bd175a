"""whence: where in its training data does a model's behaviour come from?"""

from whence.methods import FastSource, Influence, Random, Source, TracIn
from whence.recipe import Recipe
from whence.run import Recorder, Run
from whence.scores import Scores
from whence.study import Study
from whence.task import Classification, LanguageModeling, Regression, Task

__version__ = "0.1.0"

__all__ = [
    "Classification",
    "FastSource",
    "Influence",
    "LanguageModeling",
    "Random",
    "Recipe",
    "Recorder",
    "Regression",
    "Run",
    "Scores",
    "Source",
    "Study",
    "Task",
    "TracIn",
]
