"""traker: TRAK by its authors."""

from __future__ import annotations

import tempfile
from importlib import import_module

import numpy as np

import whence
from experiments.engine.trainings import Trainings
from experiments.peers.inputs import Values, batches, dimension, final_model, weights


def trak(work: Trainings, study: whence.Study) -> Values:
    """TRAK for classification, with their projector in PyTorch."""
    if not isinstance(work.recipe.task, whence.Classification):
        raise ValueError("traker knows classification, among others, but not this task")
    library, projectors = import_module("trak"), import_module("trak.projectors")
    model, data = final_model(study).to(work.device), work.recipe.stages[0].data
    size, d = sum(p.numel() for p in model.parameters()), dimension(work)
    signs = projectors.ProjectionType.rademacher
    with tempfile.TemporaryDirectory() as folder:
        judge = library.TRAKer(
            model=model,
            task="image_classification",
            train_set_size=len(data),
            save_dir=folder,
            device=work.device,
            proj_dim=d,
            projector=projectors.BasicProjector(
                size, d, 0, signs, work.device, block_size=(d + 1) // 2
            ),
            use_half_precision=False,
            logging_level=100,
        )
        final = weights(study.runs[0].final, work.device)
        judge.load_checkpoint(final, model_id=0)
        for batch in batches(data.dataset, work.device):
            judge.featurize(batch, num_samples=len(batch[1]))
        judge.finalize_features()
        judge.start_scoring_checkpoint("q", final, 0, num_targets=len(work.query))  # type: ignore[arg-type]
        for batch in batches(work.query, work.device):
            judge.score(batch, num_samples=len(batch[1]))
        return np.asarray(judge.finalize_scores("q"), np.float64).T
