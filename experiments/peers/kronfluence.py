"""kronfluence: EK-FAC influence functions."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

import whence
from experiments.engine.trainings import Trainings
from experiments.peers.inputs import BATCH, Values, final_model, training_data


def ekfac(work: Trainings, study: whence.Study, damping: float, empirical: bool = False) -> Values:
    """EK-FAC influence, with its sampled Fisher, or the empirical one."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    ours = work.recipe.task

    class Adapter(Task):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            outputs = ours.outputs(model, batch)
            if sample:
                with torch.no_grad():
                    batch = [batch[0], drawn(outputs, batch[1])]
            return ours.losses(outputs, batch).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return ours.measurements(ours.outputs(model, batch), batch).sum()

    adapter, train = Adapter(), training_data(work)
    model = prepare_model(final_model(study), adapter)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "peer",
            model,
            adapter,
            cpu=work.device == "cpu",
            disable_tqdm=True,
            output_dir=folder,
            log_level=40,
        )
        settings = FactorArguments(strategy="ekfac", use_empirical_fisher=empirical)
        analyzer.fit_all_factors("ekfac", train, per_device_batch_size=BATCH, factor_args=settings)
        analyzer.compute_pairwise_scores(
            "scores",
            "ekfac",
            work.query,
            train,
            BATCH,
            BATCH,
            score_args=ScoreArguments(damping_factor=damping),
        )
        pairs: Tensor = analyzer.load_pairwise_scores("scores")["all_modules"]
    return -pairs.float().cpu().numpy() / len(train)


def drawn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets drawn from the model's own distribution, as the Fisher needs them."""
    if targets.dtype == torch.long:
        labels: Tensor = torch.multinomial(outputs.softmax(-1), 1).squeeze(-1)
        return labels
    return outputs + math.sqrt(0.5) * torch.randn_like(outputs)
