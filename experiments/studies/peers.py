"""Other libraries on the leaderboard: the same run, data and truth, through their own code.

    python -m experiments.studies.peers TASK... [--device cuda]

Run it after `experiments.studies.single` with the same --work and --out: it adds a row for each
peer to the sums that are there, with the rank correlation of its scores and those of our re-make
on the same run. kronfluence, dattri and traker are pure Python; a peer that cannot be imported is
left out with a message. To carry one to a machine without a network, unpack its wheel into a folder
on PYTHONPATH. bergson has no row: it attributes language models of transformers only, and imports
packages with compiled parts (datasets, torchopt, bitsandbytes).
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from whence.evaluate.agreement import rank_correlation
from whence.scores import Scores

Values = np.ndarray[Any, Any]
DAMPING = 1e-8  # as our "EK-FAC"
CHECKED_DAMPING = 1e-4  # where float32 is enough for a comparison
BATCH = 256


def final_model(study: whence.Study) -> nn.Module:
    """A copy of the model that the run ended in: peers wrap its layers."""
    model, run = copy.deepcopy(study.model), study.runs[0]
    model.load_state_dict({k: v.to(torch.float32) for k, v in run.final.weights().items()})
    return model.eval()


def kronfluence_ekfac(
    work: Trainings, study: whence.Study, empirical: bool = False, damping: float = DAMPING
) -> Values:
    """EK-FAC influence by kronfluence, with its sampled Fisher, or the empirical one."""
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


def dattri_ekfac(work: Trainings, study: whence.Study) -> Values:
    """EK-FAC influence by dattri, with its empirical Fisher; linear layers only."""
    attributors = import_module("dattri.algorithm.influence_function")
    settings = {"device": work.device, "damping": DAMPING}
    return dattri_scores(work, study, partial(attributors.IFAttributorEKFAC, **settings))


def dimension(work: Trainings) -> int:
    return min(work.experiment.trak_dimension, work.examples)


def traker(work: Trainings, study: whence.Study) -> Values:
    """TRAK by its authors, for classification, with their projector in PyTorch."""
    if not isinstance(work.recipe.task, whence.Classification):
        raise ValueError("traker knows classification, among others, but not this task")
    trak = import_module("trak")
    projectors = import_module("trak.projectors")
    model, data = final_model(study).to(work.device), work.recipe.stages[0].data
    size, d = sum(p.numel() for p in model.parameters()), dimension(work)
    signs = projectors.ProjectionType.rademacher
    with tempfile.TemporaryDirectory() as folder:
        judge = trak.TRAKer(
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
        weights = {k: v.to(work.device) for k, v in model.state_dict().items()}
        judge.load_checkpoint(weights, model_id=0)
        for batch in batches(data.dataset, work.device):
            judge.featurize(batch, num_samples=len(batch[1]))
        judge.finalize_features()
        judge.start_scoring_checkpoint("q", weights, 0, num_targets=len(work.query))  # type: ignore[arg-type]
        for batch in batches(work.query, work.device):
            judge.score(batch, num_samples=len(batch[1]))
        return np.asarray(judge.finalize_scores("q"), np.float64).T


def batches(dataset: Any, device: str) -> Iterator[list[Tensor]]:
    for batch in DataLoader(dataset, batch_size=BATCH):
        yield [part.to(device) for part in batch]


@dataclass(frozen=True)
class Peer:
    """Another library's method.

    Attributes:
        make: its scores (q, n) of a run.
        remake: our method that it is compared with.
        checked: its scores for that comparison, where they must not be the same: kronfluence's
            sampled Fisher has no seed, and an inverse at a damping of 1e-8 amplifies the draws.
    """

    make: Callable[[Trainings, whence.Study], Values]
    remake: Callable[[Trainings], Any]
    checked: Callable[[Trainings, whence.Study], Values] | None = None


PEERS: Mapping[str, Peer] = {
    "kronfluence, EK-FAC": Peer(
        kronfluence_ekfac,
        lambda w: whence.Influence.published(CHECKED_DAMPING, fisher="empirical"),
        partial(kronfluence_ekfac, empirical=True, damping=CHECKED_DAMPING),
    ),
    "dattri, EK-FAC": Peer(
        dattri_ekfac, lambda w: whence.Influence.published(fisher="empirical", damping=DAMPING)
    ),
    "dattri, CG": Peer(dattri_cg, lambda w: whence.Influence(1e-2, solver="cg")),
    "traker, TRAK": Peer(traker, lambda w: whence.Trak(dimension(w))),
}


def agreement(values: Values, remake: Any, work: Trainings, study: whence.Study) -> float:
    """The rank correlation of a peer's scores with our own over the examples, mean over queries."""
    ours = remake.attribute(study, work.query, device=work.device, progress=False).values
    each = [rank_correlation(a, b) for a, b in zip(values, ours.astype(np.float64), strict=True)]
    return float(np.mean([r for r in each if r is not None]))


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
    for name, peer in PEERS.items():
        if options.only and not any(word in name for word in options.only):
            continue
        start = time.perf_counter()
        try:
            values = peer.make(work, study)
        except Exception as error:  # of code that is not ours
            single.say(task, f"{name} does not apply: {type(error).__name__}: {str(error)[:200]}")
            continue
        seconds, remake = time.perf_counter() - start, peer.remake(work)
        checked = values if peer.checked is None else peer.checked(work, study)
        alike = {"remake": repr(remake), "agreement": agreement(checked, remake, work, study)}
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
            saved.forms[name] |= alike
            saved.save(path.parent)
        single.say(task, f"{name}: {seconds:.1f} s, agrees {alike['agreement']:.3f} with ours")


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
