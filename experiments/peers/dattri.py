"""dattri: EK-FAC, conjugate gradients, DataInf, TracIn and TRAK."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import whence
from experiments.engine.trainings import Trainings
from experiments.peers.inputs import (
    BATCH,
    Values,
    checkpoints,
    dimension,
    final_model,
    training_data,
    weights,
)

WHOLE = 2048  # examples whose gradients fit in memory together


def attribution_task(
    work: Trainings, study: whence.Study, along: bool = False, losses: str = "losses"
) -> Any:
    """The final model, or all checkpoints, with our losses (or what stands for them) and
    measurements."""
    ours, model = work.recipe.task, final_model(study).to(work.device)

    def value(what: str, parameters: Any, pair: Any) -> Tensor:
        x, y = pair
        if x.dim() == 1:  # one example, under vmap
            x, y = x.unsqueeze(0), y.unsqueeze(0)
        outputs = torch.func.functional_call(model, parameters, x)
        total: Tensor = getattr(ours, what)(outputs, (x, y)).mean()
        return total

    run = study.runs[0]
    points = run.checkpoints if along else [run.final]
    return import_module("dattri.task").AttributionTask(
        loss_func=lambda parameters, pair: value(losses, parameters, pair),
        model=model,
        checkpoints=[weights(one, work.device) for one in points],
        target_func=lambda parameters, pair: value("measurements", parameters, pair),
    )


def loaders(work: Trainings, size: int = BATCH) -> list[Any]:
    """The training data and the queries."""
    return [DataLoader(data, batch_size=size) for data in (training_data(work), work.query)]


def influence(
    work: Trainings, study: whence.Study, attributor: Callable[[Any], Any], size: int = BATCH
) -> Values:
    judge, (train, query) = attributor(attribution_task(work, study)), loaders(work, size)
    judge.cache(train)
    with torch.no_grad():
        pairs: Tensor = judge.attribute(train, query)
    return -pairs.T.float().cpu().numpy() / work.examples


def conjugate_gradients(work: Trainings, study: whence.Study, damping: float) -> Values:
    """Conjugate gradients on the Hessian of the training loss.

    It solves anew for every batch of training examples: a small dataset is one batch.
    """
    size = work.examples if work.examples <= WHOLE else BATCH
    attributors = import_module("dattri.algorithm.influence_function")
    settings = {"device": work.device, "max_iter": 20, "regularization": damping}
    return influence(work, study, partial(attributors.IFAttributorCG, **settings), size)


def ekfac(work: Trainings, study: whence.Study, damping: float) -> Values:
    """EK-FAC, with its empirical Fisher; linear layers only."""
    attributors = import_module("dattri.algorithm.influence_function")
    settings = {"device": work.device, "damping": damping}
    return influence(work, study, partial(attributors.IFAttributorEKFAC, **settings))


EKFAC_FAULTS = (
    "multiplies by eigenvectors where it needs their transpose, flattens weights and biases of a "
    "layer together, and takes the Fisher matrix of the measurement instead of the loss"
)


def mended_ekfac(work: Trainings, study: whence.Study, damping: float) -> Values:
    """The same without `EKFAC_FAULTS`: what the rest of its code computes."""
    attributors: Any = import_module("dattri.algorithm.influence_function")
    fisher: Any = import_module("dattri.func.fisher")
    eigenvectors = fisher.estimate_eigenvector

    class Mended(attributors.IFAttributorEKFAC):  # type: ignore[misc]
        def cache(self, loader: Any) -> None:
            self.task.get_target_func, of_target = (
                self.task.get_loss_func,
                self.task.get_target_func,
            )
            fisher.estimate_eigenvector = lambda covariances: {
                name: (a.T, s.T) for name, (a, s) in eigenvectors(covariances).items()
            }
            try:
                super().cache(loader)
            finally:
                self.task.get_target_func = of_target
                fisher.estimate_eigenvector = eigenvectors

        def transform_test_rep(self, ckpt_idx: int, test_rep: Tensor) -> Tensor:
            columns, start = [], 0
            for name, module in self.name_to_module.items():
                o, i = module.weight.shape
                weight = test_rep[:, start : start + o * i].reshape(-1, o, i)
                bias = test_rep[:, start + o * i : start + o * i + o].reshape(-1, o, 1)
                start += o * i + o
                v, (q_a, q_s) = torch.cat([weight, bias], -1), self.cached_q[name]
                inner = (q_s @ v @ q_a.T) / (self.cached_lambdas[name] + self.damping)
                solved = q_s.T @ inner @ q_a
                columns += [solved[:, :, :-1].flatten(1), solved[:, :, -1]]
            return torch.cat(columns, 1)

    return influence(work, study, partial(Mended, device=work.device, damping=damping))


def datainf(work: Trainings, study: whence.Study, damping: float) -> Values:
    """DataInf."""
    attributors = import_module("dattri.algorithm.influence_function")
    settings = {"device": work.device, "regularization": damping}
    return influence(work, study, partial(attributors.IFAttributorDataInf, **settings))


def tracin(work: Trainings, study: whence.Study) -> Values:
    """TracIn at all checkpoints, without its random projection."""
    rates = torch.tensor([rate for _, rate in checkpoints(study)])
    attributors, task = (
        import_module("dattri.algorithm.tracin"),
        attribution_task(work, study, True),
    )
    attributor = attributors.TracInAttributor(
        task, weight_list=rates, normalized_grad=False, device=work.device
    )
    attributor.projector_kwargs = None
    with torch.no_grad():
        pairs: Tensor = attributor.attribute(*loaders(work))
    return -pairs.T.float().cpu().numpy()


def trak(work: Trainings, study: whence.Study) -> Values:
    """TRAK for classification: the gradients are those of the margins."""
    ours, task = work.recipe.task, attribution_task(work, study, losses="measurements")
    if not isinstance(ours, whence.Classification):
        raise ValueError("TRAK needs the probability of the correct class")
    model = task.get_model()

    def probability(parameters: Any, pair: Any) -> Tensor:
        x, y = pair
        outputs = torch.func.functional_call(model, parameters, x.unsqueeze(0))
        return torch.exp(-ours.losses(outputs, (x, y.unsqueeze(0))))

    settings = {"proj_dim": dimension(work), "device": work.device, "proj_max_batch_size": 32}
    attributor = import_module("dattri.algorithm.trak").TRAKAttributor(
        task, probability, projector_kwargs=settings, device=work.device
    )
    train, query = loaders(work)
    attributor.cache(train)
    with torch.no_grad():
        pairs: Tensor = attributor.attribute(query)
    return np.asarray(pairs.T.double().cpu().numpy())
