"""The tasks: what is trained, on which data, and which methods attribute it."""

from experiments.tasks.catalogue import TASKS
from experiments.tasks.experiment import RESULTS, Experiment, RecipeAndHeldOut, Removal, Scale
from experiments.tasks.small import SMALL

ALL = {**TASKS, **SMALL}

__all__ = ["ALL", "RESULTS", "TASKS", "Experiment", "RecipeAndHeldOut", "Removal", "Scale"]
