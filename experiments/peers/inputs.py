"""What every library is given: the model, its checkpoints, and data in batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import whence
from experiments.engine.trainings import Trainings

Values = np.ndarray[Any, Any]
BATCH = 256


def final_model(study: whence.Study) -> nn.Module:
    """A copy of the model that the run ended in: peers wrap its layers."""
    model = copy.deepcopy(study.model)
    model.load_state_dict(weights(study.runs[0].final))
    return model.eval()


def weights(checkpoint: Any, device: str = "cpu") -> dict[str, Tensor]:
    return {k: v.to(device, torch.float32) for k, v in checkpoint.weights().items()}


def checkpoints(study: whence.Study) -> list[tuple[Any, float]]:
    """Every checkpoint, and the learning rate of the update that led to it."""
    run = study.runs[0]
    some = next(name for name, _ in study.model.named_parameters())
    return [(one, run.rate_at(one, some)) for one in run.checkpoints]


def training_data(work: Trainings) -> Any:
    return work.recipe.stages[0].data.dataset


def batches(dataset: Any, device: str) -> Iterator[list[Tensor]]:
    for batch in DataLoader(dataset, batch_size=BATCH):
        yield [part.to(device) for part in batch]


def dimension(work: Trainings) -> int:
    """Of TRAK's projection."""
    return min(work.experiment.trak_dimension, work.examples)
