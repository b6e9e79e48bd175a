"""Runs: recording a training, and reading what it recorded."""

from whence.run.checkpoint import Checkpoint, RunError, plain_names
from whence.run.format import Stage
from whence.run.mean_checkpoint import MeanCheckpoint
from whence.run.recorder import Recorder
from whence.run.run import Run, Segment

__all__ = [
    "Checkpoint",
    "MeanCheckpoint",
    "Recorder",
    "Run",
    "RunError",
    "Segment",
    "Stage",
    "plain_names",
]
