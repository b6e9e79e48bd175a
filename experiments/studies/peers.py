"""Other libraries on the leaderboard: the same run, data and truth, through their own code.

    python -m experiments.studies.peers TASK... [--device cuda]

Run it after `experiments.studies.single` with the same --work and --out: it adds a row for each
peer to the sums that are there. kronfluence and dattri are pure Python; a peer that cannot be
imported is left out with a message. To carry one to a machine without a network, unpack its wheel
into a folder on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import whence
from experiments.engine.trainings import Trainings
from experiments.studies import single
from experiments.studies.options import parsed
from experiments.studies.sums import Sums
from experiments.tasks.board import BOARD, PROTOCOLS
from whence.scores import Scores

Values = np.ndarray[Any, Any]
DAMPING = 1e-8  # as our "EK-FAC"
BATCH = 256


def final_model(study: whence.Study) -> nn.Module:
    """A copy of the model that the run ended in: peers wrap its layers."""
    model, run = copy.deepcopy(study.model), study.runs[0]
    model.load_state_dict({k: v.to(torch.float32) for k, v in run.final.weights().items()})
    return model.eval()


def kronfluence_ekfac(work: Trainings, study: whence.Study) -> Values:
    """EK-FAC influence by kronfluence, with its sampled Fisher."""
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

    adapter, train = Adapter(), work.recipe.stages[0].data.dataset
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
        settings = FactorArguments(strategy="ekfac")
        analyzer.fit_all_factors("ekfac", train, per_device_batch_size=BATCH, factor_args=settings)
        analyzer.compute_pairwise_scores(
            "scores",
            "ekfac",
            work.query,
            train,
            BATCH,
            BATCH,
            score_args=ScoreArguments(damping_factor=DAMPING),
        )
        pairs: Tensor = analyzer.load_pairwise_scores("scores")["all_modules"]
    return -pairs.float().cpu().numpy() / len(train)


def drawn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets drawn from the model's own distribution, as the Fisher needs them."""
    if targets.dtype == torch.long:
        labels: Tensor = torch.multinomial(outputs.softmax(-1), 1).squeeze(-1)
        return labels
    return outputs + math.sqrt(0.5) * torch.randn_like(outputs)


def dattri_cg(work: Trainings, study: whence.Study) -> Values:
    """Influence functions by dattri: conjugate gradients on the Hessian of the training loss."""
    attributors = import_module("dattri.algorithm.influence_function")

    λ = 1e-2  # the Hessian has negative eigenvalues, where CG without damping diverges
    settings = {"device": work.device, "max_iter": 20, "regularization": λ}
    return dattri_scores(work, study, partial(attributors.IFAttributorCG, **settings))


def dattri_scores(work: Trainings, study: whence.Study, attributor: Callable[[Any], Any]) -> Values:
    ours, model = work.recipe.task, final_model(study).to(work.device)

    def value(what: str, parameters: Any, pair: Any) -> Tensor:
        x, y = pair
        if x.dim() == 1:  # one example, under vmap
            x, y = x.unsqueeze(0), y.unsqueeze(0)
        outputs = torch.func.functional_call(model, parameters, x)
        total: Tensor = getattr(ours, what)(outputs, (x, y)).mean()
        return total

    task = import_module("dattri.task").AttributionTask(
        loss_func=lambda parameters, pair: value("losses", parameters, pair),
        model=model,
        checkpoints={k: v.to(work.device) for k, v in model.state_dict().items()},
        target_func=lambda parameters, pair: value("measurements", parameters, pair),
    )
    train = DataLoader(work.recipe.stages[0].data.dataset, batch_size=BATCH)
    query = DataLoader(work.query, batch_size=BATCH)
    judge = attributor(task)
    judge.cache(train)
    with torch.no_grad():
        pairs: Tensor = judge.attribute(train, query)
    return -pairs.T.float().cpu().numpy() / len(work.recipe.stages[0].data)


PEERS: Mapping[str, Callable[[Trainings, whence.Study], Values]] = {
    "kronfluence, EK-FAC": kronfluence_ekfac,
    "dattri, CG": dattri_cg,
}


def judge(task: str, options: argparse.Namespace) -> None:
    """Add every peer's row to the sums of a task."""
    work = single.trainings(task, options)
    files = {
        protocol: path
        for protocol in PROTOCOLS
        for path in (options.out / protocol.name).glob("*.npz")
        if Sums.load(path).protocol.task == task
    }
    if not files:
        raise ValueError(f"{options.out} has no sums of {task}: run experiments.studies.single")
    study, recipe = work.study(0), work.recipe
    for name, make in PEERS.items():
        if options.only and not any(word in name for word in options.only):
            continue
        start = time.perf_counter()
        try:
            values = make(work, study)
        except (ImportError, ValueError, RuntimeError) as error:
            single.say(task, f"{name} does not apply: {type(error).__name__}: {str(error)[:200]}")
            continue
        seconds = time.perf_counter() - start
        for protocol, path in files.items():
            saved = Sums.load(path)
            truth = work.single_truth(protocol.alpha) if protocol.in_place else work.truth()
            scores = Scores(
                values,
                method=name,
                measurement=recipe.task.measurement,
                unit=recipe.task.unit,
                higher_is_better=recipe.task.higher_is_better,
                provenance={"recipe": truth.recipe, "query": truth.query},
            )
            saved.add(name, [scores], [truth], f"{name}, final checkpoint", seconds)
            saved.save(path.parent)
        single.say(task, f"{name}: {seconds:.1f} s")


def main() -> None:
    options = parsed(single.of_methods(__doc__), BOARD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for task in options.tasks or BOARD:
            judge(task, options)
            for path in sorted(options.out.rglob("*.npz")):
                if Sums.load(path).protocol.task == task and not options.no_rows:
                    single.judge(path, options.results / "leaderboard.json")


if __name__ == "__main__":
    main()
