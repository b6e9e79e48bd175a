"""A minute's tour: train on digits with some labels flipped, and find out who did it.

    python -m whence.demo [--out whence-demo] [--seed 0] [--json]

Trains a small MLP on scikit-learn's bundled digits through a `Recorder`, attributes its test
predictions with SOURCE, influence functions and TracIn, prints who helped and who harmed, and how
many of the flipped labels are among the most harmful examples.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

import whence
from whence.errors import MissingDependency

FLIPPED = 0.1
TRAIN, EPOCHS, BATCH = 1500, 20, 64
SHOWN = 3  # queries that are printed and drawn


@dataclass(frozen=True)
class Digits:
    """Training digits with some labels flipped, and test digits as they are."""

    train: TensorDataset
    test: TensorDataset
    flipped: NDArray[np.bool_]


def digits(seed: int) -> Digits:
    """1,500 training digits, a tenth of them mislabelled on purpose, and 297 test digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependency(
            "the demo needs scikit-learn: pip install 'whence-tda[demo]'"
        ) from error
    images, labels = load_digits(return_X_y=True)
    random = np.random.default_rng(seed)
    order = random.permutation(len(labels))
    images, labels = images[order].astype(np.float32) / 16, labels[order].astype(np.int64)
    flipped = np.zeros(TRAIN, dtype=bool)
    flipped[random.choice(TRAIN, int(FLIPPED * TRAIN), replace=False)] = True
    labels[:TRAIN][flipped] = (labels[:TRAIN][flipped] + random.integers(1, 10, flipped.sum())) % 10
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    return Digits(TensorDataset(x[:TRAIN], y[:TRAIN]), TensorDataset(x[TRAIN:], y[TRAIN:]), flipped)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, progress: bool) -> None:
    """An ordinary training loop: it knows nothing of whence."""
    for _ in tqdm(range(EPOCHS), desc="training", unit="epoch", disable=not progress, leave=False):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="whence demo", description="A minute's tour on digits.")
    parser.add_argument("--out", default="whence-demo", help="folder for run, scores and figure")
    parser.add_argument("--seed", type=int, default=0, help="of data, flips and training")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, for machines"
    )
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is fastest on one, above all on a busy machine
    try:
        with redirect_stdout(sys.stderr if options.json else sys.stdout):
            outcome = _tour(options)
        if options.json:
            print(json.dumps(outcome, indent=2))
        return 0
    except ImportError as error:
        print(f"whence: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was fitted is in {options.out}", file=sys.stderr)
        return 130
    finally:
        torch.set_num_threads(threads)


def _tour(options: argparse.Namespace) -> dict[str, Any]:
    """Train, attribute, tell; and what was found."""
    out, progress = Path(options.out), not options.quiet

    data = digits(options.seed)
    torch.manual_seed(options.seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    loader = DataLoader(data.train, BATCH, shuffle=True)
    with whence.Recorder(
        out / "run",
        model,
        optimizer,
        checkpoints=6,
        total_steps=len(loader) * EPOCHS,
        size=TRAIN,
        overwrite=True,
    ):
        train(model, optimizer, loader, progress)
    with torch.no_grad():
        x, y = data.test.tensors
        predicted = model(x).argmax(1)
    accuracy = float((predicted == y).float().mean())
    print(
        f"Trained on {TRAIN} digits, {int(data.flipped.sum())} of them with a wrong label on "
        f"purpose; test accuracy {accuracy:.1%}."
    )

    study = whence.Study(model, whence.Classification(), train=data.train, runs=out / "run")
    methods = {
        "SOURCE": whence.Source(),
        "influence functions": whence.Influence(damping="source"),
        "TracIn": whence.TracIn(),
    }
    scores = {}
    for name, method in methods.items():
        scores[name] = method.attribute(study, data.test, progress=progress)
        scores[name].save(out / "scores" / type(method).__name__.lower())
    shown = _telling(scores["SOURCE"], data, SHOWN)
    for query in shown:
        _describe(scores["SOURCE"], data, query, int(predicted[query]))
    print("\nMost harmful to the test set as a whole (mean score over all test digits):")
    count, wrong = int(data.flipped.sum()), {}
    for name, found in scores.items():
        worst = np.argsort(found.values.mean(0))[:count]  # margins: harm is what lowers them
        wrong[name] = int(data.flipped[worst].sum())
        print(f"  {name:<20} {wrong[name]:>3} of the {count} worst have a flipped label")
    print(f"  {'by chance':<20} {count * FLIPPED:>3.0f}")
    figure = _draw(scores["SOURCE"], data, shown, out / "figure.png")
    print(f"\nRun, scores and figure: {out / 'run'}, {out / 'scores'}, {figure}")
    return {
        "out": str(out),
        "accuracy": accuracy,
        "flipped": count,
        "flipped_among_the_worst": wrong,
        "figure": str(figure),
    }


def _telling(scores: whence.Scores, data: Digits, count: int) -> list[int]:
    """Test digits that flipped labels harmed most."""
    harm = np.minimum(scores.values, 0)[:, data.flipped].sum(1)
    return [int(q) for q in np.argsort(harm)[:count]]


def _describe(scores: whence.Scores, data: Digits, query: int, predicted: int) -> None:
    labels = data.train.tensors[1]
    print(f"\nTest digit {query}: a {int(data.test.tensors[1][query])}, taken for a {predicted}.")
    for word, ranking in (
        ("helped", scores.helpful(query, 5)),
        ("harmed", scores.harmful(query, 5)),
    ):
        named = ", ".join(
            f"#{e.example} labelled {int(labels[e.example])}"
            + (" (flipped)" if data.flipped[e.example] else "")
            + f" {e.value:+.3f}"
            for e in ranking
        )
        print(f"  {word}: {named}")


def _draw(scores: whence.Scores, data: Digits, queries: list[int], path: Path) -> Path:
    """Queries with the digits that helped and harmed them most; flipped labels are marked."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependency(
            "the figure needs matplotlib: pip install 'whence-tda[demo]'"
        ) from error
    columns_per_side = 5
    figure, axes = plt.subplots(
        len(queries),
        1 + 2 * columns_per_side,
        figsize=(1.15 * (1 + 2 * columns_per_side), 1.6 * len(queries)),
        squeeze=False,
    )
    for row, query in zip(axes, queries, strict=True):
        helped, harmed = (
            scores.helpful(query, columns_per_side),
            scores.harmful(query, columns_per_side),
        )
        cells = [(data.test.tensors, query, "query", "black")]
        cells += [(data.train.tensors, e.example, f"{e.value:+.2f}", "#0072B2") for e in helped]
        cells += [(data.train.tensors, e.example, f"{e.value:+.2f}", "#D55E00") for e in harmed]
        for axis, (tensors, index, title, colour) in zip(row, cells, strict=True):
            axis.imshow(tensors[0][index].view(8, 8), cmap="gray_r")
            wrong = tensors is data.train.tensors and data.flipped[index]
            label = f"{int(tensors[1][index])}" + (" (flipped)" if wrong else "")
            axis.set_title(title, fontsize=8, color=colour)
            axis.set_xlabel(label, fontsize=8, fontweight="bold" if wrong else "normal")
            axis.set_xticks([])
            axis.set_yticks([])
            for side in axis.spines.values():
                side.set_color(colour)
                side.set_linewidth(2.5 if wrong else 1)
    figure.suptitle(
        "Who helped (blue) and who harmed (orange): change of the query's margin, in logits",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())
