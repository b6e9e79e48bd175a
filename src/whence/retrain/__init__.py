"""Retraining: many trainings at once, and the truth they make."""

from whence.retrain.measure import measure
from whence.retrain.record import record
from whence.retrain.training import Training
from whence.retrain.truth import Truth, ground_truth

__all__ = ["Training", "Truth", "ground_truth", "measure", "record"]
