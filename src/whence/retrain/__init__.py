"""Retraining: recipes, many trainings at once, and the truth they measure."""

from whence.retrain.measure import measure
from whence.retrain.recording_many import record
from whence.retrain.training import Training, Update
from whence.retrain.truth import Truth, ground_truth
from whence.run.smooth_adamw import SmoothAdamW

__all__ = ["SmoothAdamW", "Training", "Truth", "Update", "ground_truth", "measure", "record"]
