"""Other libraries on the leaderboard: the same run, data and truth, through their own code.

    python -m experiments.studies.peers TASK... [--device cuda]

Run it after `experiments.studies.single` with the same --work and --out, or with --published: it
adds a row for each peer to the sums that are there, with the rank correlation of its scores and
those of our re-make on the same run. The reason why a peer has no row is stored too. Peers are not
installed with whence, because some of them want other versions of PyTorch:

    pip install --no-deps --target FOLDER dattri captum bergson     # and FOLDER on PYTHONPATH
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

import whence
from experiments.engine.trainings import Trainings
from experiments.peers import bergson, captum, dattri, kronfluence, traker
from experiments.peers.inputs import Values, dimension, training_data
from experiments.studies import single
from experiments.studies.options import parsed
from experiments.studies.sums import Sums
from experiments.tasks.board import BOARD, PROTOCOLS, Protocol
from experiments.tasks.machine import seconds
from whence.data import Batches
from whence.evaluate.agreement import rank_correlation
from whence.layers.choose import Chooser, by_name
from whence.scores import Scores

DAMPING = 1e-8  # as our "EK-FAC"
CHECKED_DAMPING = 1e-4  # where float32 is enough for a comparison
# The Hessian has negative eigenvalues, where conjugate gradients without damping diverge.
HESSIAN_DAMPING = 1e-2
DATAINF_DAMPING = 0.1
RANK, LEADING_DAMPING = 50, 1e-3  # captum's defaults
TEXT_DAMPING = 1e-2
BLOCKS = by_name(["model.transformer.h.*"])  # bergson leaves out the head


def tokens(work: Trainings) -> int:
    """The predicted tokens of a document."""
    return len(training_data(work)[0][0]) - 1


@dataclass(frozen=True)
class Peer:
    """Another library's method.

    Attributes:
        make: its scores (q, n) of a run.
        remake: our method that it is compared with.
        layers: that it tracks (default: all matrices).
        checked: its scores for that comparison, where they must not be the same: kronfluence's
            sampled Fisher has no seed, and an inverse at a damping of 1e-8 amplifies the draws.
        mended: the same after its faults are mended in place, where that explains a difference.
        faults: what was mended.
    """

    make: Callable[[Trainings, whence.Study], Values]
    remake: Callable[[Trainings], Any]
    layers: Chooser | None = None
    checked: Callable[[Trainings, whence.Study], Values] | None = None
    mended: Callable[[Trainings, whence.Study], Values] | None = None
    faults: str = ""


PEERS: Mapping[str, Peer] = {  # those that take long come last
    "kronfluence, EK-FAC": Peer(
        partial(kronfluence.ekfac, damping=DAMPING),
        lambda w: whence.Influence.published(CHECKED_DAMPING, fisher="empirical"),
        checked=partial(kronfluence.ekfac, damping=CHECKED_DAMPING, empirical=True),
    ),
    "dattri, EK-FAC": Peer(
        partial(dattri.ekfac, damping=DAMPING),
        lambda w: whence.Influence.published(CHECKED_DAMPING, fisher="empirical"),
        checked=partial(dattri.ekfac, damping=CHECKED_DAMPING),
        mended=partial(dattri.mended_ekfac, damping=CHECKED_DAMPING),
        faults=dattri.EKFAC_FAULTS,
    ),
    "dattri, TracIn": Peer(dattri.tracin, lambda w: whence.TracIn()),
    "dattri, TRAK": Peer(dattri.trak, lambda w: whence.Trak(dimension(w))),
    "captum, TracInCP": Peer(captum.tracin, lambda w: whence.TracIn()),
    "captum, Arnoldi": Peer(
        partial(captum.arnoldi, damping=LEADING_DAMPING, rank=RANK),
        lambda w: whence.Influence(LEADING_DAMPING, solver="arnoldi", rank=RANK),
    ),
    "traker, TRAK": Peer(traker.trak, lambda w: whence.Trak(dimension(w))),
    "bergson, EK-FAC": Peer(
        partial(bergson.ekfac, damping=DAMPING),
        # its curvature is that of the summed losses of the tokens, ours that of their mean
        lambda w: whence.Influence.published(TEXT_DAMPING / tokens(w), fisher="empirical"),
        layers=BLOCKS,
        checked=partial(bergson.ekfac, damping=TEXT_DAMPING, empirical=True),
    ),
    "bergson, TrackStar": Peer(
        bergson.trackstar, lambda w: whence.TrackStar(dimension(w)), layers=BLOCKS
    ),
    "dattri, DataInf": Peer(
        partial(dattri.datainf, damping=DATAINF_DAMPING),
        lambda w: whence.Influence(DATAINF_DAMPING, solver="datainf"),
    ),
    "dattri, CG": Peer(
        partial(dattri.conjugate_gradients, damping=HESSIAN_DAMPING),
        lambda w: whence.Influence(HESSIAN_DAMPING, solver="cg"),
    ),
}


def agreements(peer: Peer, values: Values, work: Trainings, study: whence.Study) -> dict[str, Any]:
    """How a peer's scores, as they are and mended, agree with those of our re-make."""
    remake = peer.remake(work)
    same = study if peer.layers is None else work.study(0, layers=peer.layers)
    ours = remake.attribute(same, work.query, device=work.device, progress=False).values
    checked = values if peer.checked is None else peer.checked(work, study)
    alike = {"remake": repr(remake), "agreement": agreement(checked, ours)}
    if peer.mended is not None:
        mended = agreement(peer.mended(work, study), ours)
        alike |= {"mended": mended, "faults": peer.faults}
    return alike


def agreement(theirs: Values, ours: Values) -> float:
    """The rank correlation over the examples, mean over the queries."""
    each = [rank_correlation(a, b) for a, b in zip(theirs, ours.astype(np.float64), strict=True)]
    return float(np.mean([r for r in each if r is not None]))


def judge(task: str, options: argparse.Namespace) -> None:
    """Add every peer's row to the sums of a task."""
    work = single.trainings(task, options)
    truths, files = single.given(task, options) if options.published else saved(work, options)
    study = work.study(0)
    for name, peer in PEERS.items():
        if options.only and not any(word in name for word in options.only):
            continue
        if all(single.has(sums, name, described(name)) for sums in files.values()):
            continue
        start = seconds(work.device)
        try:
            values = peer.make(work, study)
        except Exception as error:  # of code that is not ours
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            single.say(task, f"{name} does not apply: {reason}")
            for protocol, sums in files.items():
                sums.about.setdefault("refused", {})[name] = f"{described(name)}: {reason}"
                sums.save(options.out / protocol.name)
            continue
        cost = seconds(work.device) - start
        alike = agreements(peer, values, work, study)
        for protocol, sums in files.items():
            sums.add(
                name, [as_scores(values, work, name)], [truths[protocol]], described(name), cost
            )
            single.note_device(sums, name, work.device)
            sums.forms[name] |= alike
            sums.about.get("refused", {}).pop(name, None)
            sums.save(options.out / protocol.name)
        single.say(task, f"{name}: {cost:.1f} s, agrees {alike['agreement']:.3f} with ours")


def saved(
    work: Trainings, options: argparse.Namespace
) -> tuple[dict[Protocol, Any], dict[Protocol, Sums]]:
    """The truths and sums that `experiments.studies.single` left."""
    task, truths, files = work.experiment.name, {}, {}
    for protocol in PROTOCOLS:
        for path in (options.out / protocol.name).glob("*.npz"):
            if Sums.load(path).protocol.task == task:
                files[protocol] = Sums.load(path)
                truths[protocol] = (
                    work.single_truth(protocol.alpha) if protocol.in_place else work.truth()
                )
    if not files:
        raise ValueError(f"{options.out} has no sums of {task}: run experiments.studies.single")
    return truths, files


def as_scores(values: Values, work: Trainings, name: str) -> Scores:
    task = work.recipe.task
    return Scores(
        values,
        method=name,
        measurement=task.measurement,
        unit=task.unit,
        higher_is_better=task.higher_is_better,
        provenance={
            "recipe": work.recipe.fingerprint,
            "query": Batches("query", work.query).fingerprint(),
        },
    )


def described(name: str) -> str:
    """A library and its version."""
    library = name.split(",")[0]
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return f"{library}, not installed"


def main() -> None:
    options = parsed(single.of_methods(__doc__), BOARD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for task in options.tasks or BOARD:
            judge(task, options)
            for path in sorted(options.out.rglob("*.npz")):
                if Sums.load(path).protocol.task == task and not options.no_rows:
                    single.judge([path], options.results / "leaderboard.json")


if __name__ == "__main__":
    main()
