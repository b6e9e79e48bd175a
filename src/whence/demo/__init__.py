"""A one-minute tour: train on pictures with wrong labels, find them, and prove it by retraining.

    python -m whence.demo [--out whence-demo] [--seed 0] [--json]

A small MLP learns 1,500 pictures of clothes (part of Fashion-MNIST, in `pictures.npz`), a fifth of
them with a wrong label. SOURCE, influence functions and TracIn say which training pictures matter
to 300 queries. Then models are trained on random halves, to see how well the scores predict them,
and without the pictures that harm the queries most. The tour ends with a report, a study file, and
the next command.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import whence
from whence.errors import optional
from whence.retrain import Training, Truth, ground_truth, measure
from whence.table import Table, estimate

PICTURES = Path(__file__).with_name("pictures.npz")
CLASSES = [
    "T-shirt",
    "trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
]
TRAIN, QUERIES, FLIPPED = 1500, 300, 0.2
EPOCHS, BATCH, SEEDS = 20, 64, 3
HALVES, SEEDS_OF_A_HALF = 30, 2
SHOWN = 3  # queries that are printed and drawn
METHODS = {  # and the folders of their scores
    "SOURCE": (whence.Source(), "source"),
    "influence, damped like SOURCE": (whence.Influence(), "influence"),
    "influence, as published": (whence.Influence.published(), "influence-published"),
    "TracIn": (whence.TracIn(), "tracin"),
}

STUDY = '''"""The study of `whence demo`: what was trained, and how. whence's commands take it."""

import whence
from whence.demo import CLASSES as classes
from whence.demo import network, pictures, recipe_for

data = pictures(seed={seed})                  # 1,500 training pictures, a fifth mislabelled
query = data.query                          # 300 test pictures to explain
recipe = recipe_for(data.train)             # how to train: for `whence whatif` and `whence truth`
study = whence.Study(
    network(), whence.Classification(), data.train, runs=recipe.run({seed}, "run", device="cpu")
)
'''


@dataclass(frozen=True)
class Pictures:
    """Training pictures with some wrong labels, queries, and pictures that no method sees."""

    train: TensorDataset
    query: TensorDataset
    unseen: TensorDataset
    flipped: NDArray[np.bool_]  # of the training pictures, those with a wrong label


class Accuracy(whence.Classification):
    """Trains like `Classification`, and measures whether a picture is recognised."""

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.correct(outputs, batch)


def pictures(seed: int) -> Pictures:
    """1,500 training pictures, a fifth mislabelled on purpose, 300 queries and 300 unseen ones."""
    with np.load(PICTURES, allow_pickle=False) as file:
        images, labels = file["images"].astype(np.float32) / 15, file["labels"].astype(np.int64)
    random = np.random.default_rng(seed)
    flipped = np.zeros(TRAIN, dtype=bool)
    flipped[random.choice(TRAIN, int(FLIPPED * TRAIN), replace=False)] = True
    other = random.integers(1, len(CLASSES), flipped.sum())
    labels[:TRAIN][flipped] = (labels[:TRAIN][flipped] + other) % len(CLASSES)
    x, y = torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels)
    parts = slice(TRAIN), slice(TRAIN, TRAIN + QUERIES), slice(-QUERIES, None)
    train, query, unseen = (TensorDataset(x[part], y[part]) for part in parts)
    return Pictures(train, query, unseen, flipped)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, len(CLASSES)))


def recipe_for(train: TensorDataset, task: whence.Task | None = None) -> whence.Recipe:
    """How the demo trains."""
    optimizer = partial(torch.optim.SGD, lr=0.03, momentum=0.9)
    task = task or whence.Classification()
    return whence.Recipe(network, task, train, optimizer, batch_size=BATCH, epochs=EPOCHS)


def trained_on_halves(
    recipe: whence.Recipe, query: TensorDataset, seed: int, out: Path | None, progress: bool
) -> Truth:
    """Measurements of the queries after trainings on random halves of the pictures."""
    return ground_truth(
        recipe,
        query,
        subsets=HALVES,
        seeds=SEEDS_OF_A_HALF,
        out=out,
        seed=seed,
        device="cpu",
        progress=progress,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dataset: TensorDataset) -> None:
    """An ordinary training loop, as a user would write it: it knows nothing of whence."""
    loader = DataLoader(dataset, BATCH, shuffle=True)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="whence demo",
        description="Find wrong labels in pictures, and prove it by retraining. Takes a minute.",
    )
    parser.add_argument("--out", default="whence-demo", help="folder for run, scores and report")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the wrong labels and of training"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, for machines"
    )
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is fastest on one, above all on a busy machine
    try:
        with redirect_stdout(sys.stderr if options.json else sys.stdout):
            outcome = _tour(Path(options.out), options.seed, not options.quiet)
        if options.json:
            print(json.dumps(outcome, indent=2))
        return 0
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was fitted is in {options.out}", file=sys.stderr)
        return 130
    finally:
        torch.set_num_threads(threads)


def _tour(out: Path, seed: int, progress: bool) -> dict[str, Any]:
    """Train, attribute, retrain, tell; and what was found."""
    with optional("the demo needs SciPy", "demo"):
        from whence.evaluate import calibration, lds
    data = pictures(seed)
    count = int(data.flipped.sum())
    print(f"Training on {TRAIN:,} pictures, {count} of them with a wrong label on purpose.")
    recipe = recipe_for(data.train)
    run = recipe.run(seed, out / "run", device="cpu", progress=progress)
    study = whence.Study(network(), recipe.task, data.train, run)
    scores, worst = {}, {}
    for name, (method, folder) in METHODS.items():
        scores[name] = method.attribute(study, data.query, progress=progress)
        scores[name].save(out / "scores" / folder)
        worst[name] = np.argsort(scores[name].values.mean(0))[:count]  # margins: harm lowers them
    source = scores["SOURCE"]
    shown = _telling(source, data, SHOWN)
    for query in shown:
        _describe(source, data, query)
    print("\nIs it true? Train again, and look.")
    print(
        f"  LDS: models are trained on {HALVES} random halves of the pictures. Do the scores rank"
    )
    print("    the outcomes for each query as retraining does? 1 is perfect, 0 is chance.")
    print(f"  Wrong labels: among the {count} pictures that harm the queries most on average.")
    print(f"  Accuracy: of models trained without these, on {QUERIES} pictures that no method saw.")
    truth = trained_on_halves(recipe, data.query, seed, out / "truth", progress)
    rank = {name: lds(one, truth) for name, one in scores.items()}
    worst["at random"] = np.random.default_rng(seed).permutation(TRAIN)[:count]
    accuracy = _retrained(data, worst, seed, progress)
    wrong = {name: int(data.flipped[places].sum()) for name, places in worst.items()}
    known = {name: estimate(one.value, one.interval, 2) for name, one in rank.items()}
    rows = [(n, known.get(n), f"{wrong[n]} of {count}", f"{accuracy[n]:.1%}") for n in worst]
    print(Table(("method", "LDS [95 %]", "wrong labels", "accuracy"), rows))
    size = calibration(source, truth)
    factor = estimate(size.slope, size.interval, 2)
    print(f"With all pictures, the accuracy is {accuracy['all']:.1%}.")
    print(f"Real changes are {factor} times those that SOURCE predicts.")
    report = source.report(
        out / "report.html",
        study=study,
        query=data.query,
        classes=CLASSES,
        truth=truth,
        title="whence demo",
    )
    (out / "study.py").write_text(STUDY.format(seed=seed))
    figure = _draw(source, data, shown, out / "figure.png")
    print(f"\nOpen {report} in a browser. To explore it yourself:")
    given = f"{out / 'scores/source'} --study {out / 'study.py'} --truth {out / 'truth'}"
    print(f"  whence explore {given}")
    return {
        "out": str(out),
        "flipped": count,
        "flipped_among_the_worst": wrong,
        "lds": {name: one.value for name, one in rank.items()},
        "accuracy": accuracy,
        "report": str(report),
        "study": str(out / "study.py"),
        "figure": None if figure is None else str(figure),
    }


def _retrained(
    data: Pictures, worst: dict[str, NDArray[np.int64]], seed: int, progress: bool
) -> dict[str, float]:
    """The share of unseen pictures that models recognise, trained on all and without the worst."""
    seeds = range(seed, seed + SEEDS)
    trainings = [Training(s) for s in seeds]
    for places in worst.values():
        mask = np.ones(TRAIN, dtype=bool)
        mask[places] = False
        trainings += [Training(s, mask) for s in seeds]
    recipe = recipe_for(data.train, Accuracy())
    measured = measure(recipe, data.unseen, trainings, device="cpu", progress=progress)
    means = measured.reshape(-1, SEEDS * len(data.unseen)).mean(1)
    return dict(zip(["all", *worst], map(float, means), strict=True))


def _telling(scores: whence.Scores, data: Pictures, count: int) -> list[int]:
    """Queries of different classes that wrong labels harmed most."""
    harm = np.minimum(scores.values, 0)[:, data.flipped].sum(1)
    labels = data.query.tensors[1]
    chosen: dict[int, int] = {}
    for query in np.argsort(harm):
        chosen.setdefault(int(labels[query]), int(query))
    return list(chosen.values())[:count]


def _describe(scores: whence.Scores, data: Pictures, query: int) -> None:
    labels = data.train.tensors[1]
    print(f"\nQuery {query} ({CLASSES[int(data.query.tensors[1][query])]})")
    for word, ranking in (
        ("helped", scores.helpful(query, 4)),
        ("harmed", scores.harmful(query, 4)),
    ):
        named = ", ".join(
            f"#{e.example} labelled {CLASSES[int(labels[e.example])]}"
            + (" (wrong)" if data.flipped[e.example] else "")
            for e in ranking
        )
        print(f"  {word} by: {named}")


def _draw(scores: whence.Scores, data: Pictures, queries: list[int], path: Path) -> Path | None:
    """Queries with the pictures that helped and harmed them most; None without matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return None
    side = 5
    size = (1.1 * (1 + 2 * side), 1.45 * len(queries) + 0.2)
    with plt.ioff():
        figure, axes = plt.subplots(len(queries), 1 + 2 * side, figsize=size, squeeze=False)
    for row, query in zip(axes, queries, strict=True):
        cells = [(data.query.tensors, query, "query", "black")]
        for ranked, colour in (
            (scores.helpful(query, side), "#0072B2"),
            (scores.harmful(query, side), "#D55E00"),
        ):
            for k, entry in enumerate(ranked, 1):
                word = "helped" if colour == "#0072B2" else "harmed"
                cells.append((data.train.tensors, entry.example, f"{word} {k}", colour))
        for axis, (tensors, index, title, colour) in zip(row, cells, strict=True):
            axis.imshow(tensors[0][index, 0], cmap="gray_r")
            wrong = tensors is data.train.tensors and data.flipped[index]
            axis.set_title(title, fontsize=8, color=colour)
            axis.set_xlabel(f"“{CLASSES[int(tensors[1][index])]}”", fontsize=8, labelpad=2)
            if wrong:
                axis.xaxis.label.set(color="#D55E00", fontweight="bold")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set(color=colour, linewidth=2.5 if wrong else 1)
    figure.tight_layout(pad=0.4, w_pad=0.5)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
