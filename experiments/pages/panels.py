"""The most helpful and most harmful training examples of a few queries: images and texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.pages.figures import FOLDER, QUERIES
from experiments.pages.markdown import escaped, table
from experiments.pages.tables import Result, counted, title
from experiments.tasks import TASKS, Experiment, data

MAX_LETTERS = 240  # of a text in a panel
CLASS_NAMES = {"SST-2": ("negative", "positive")}  # labels that are numbers in the files
NEEDS = {  # one of these files, to show a task's examples
    "fashion_mnist": ("fashion_mnist/fashion_mnist.npz",),
    "rotated_mnist": ("mnist/mnist.npz",),
    "cifar10": ("cifar10/cifar10.npz", "cifar10/cifar10_subset.npz"),
    "pacs": ("pacs/pacs_64.npz",),
    "rte": ("glue/RTE/train.tsv",),
    "sst2": ("glue/SST-2/train.tsv",),
    "qnli": ("glue/QNLI/dev.tsv",),
    "wikitext2": ("wikitext2/wiki.train.raw", "wikitext2/wikitext103vocab.train_part.txt"),
}

Results = Mapping[str, Result]
Panel = list[dict[str, list[int]]]  # for each query, the two examples of each method


def available(task: str) -> bool:
    """Whether a task's dataset is on this machine. Nothing is downloaded for a page."""
    return any((root / file).is_file() for root in data.roots() for file in NEEDS[task])


def of_kind(results: Results, kind: str) -> list[str]:
    """The tasks whose examples are images, or texts."""
    return [task for task in results if TASKS[task].panel == kind]


def _models(result: Result) -> str:
    return counted(result["panels"]["of"]["runs"], "model")


def image_panels(results: Results, docs: Path) -> str:
    """The figures of examples that exist below `docs`."""
    parts = []
    for task in of_kind(results, "image"):
        name, heading = f"{FOLDER}/examples-{task}.png", title(task, results[task])
        if (docs / name).is_file():
            scores = f"**{heading}**, by the mean scores of {_models(results[task])}:"
            alt = f"{heading}: the most helpful and most harmful training images of a few queries"
            parts.append(f"{scores}\n\n![{alt}]({name})")
        else:
            parts.append(f"**{heading}**: *not drawn, because the dataset is missing.*")
    return "\n\n".join(parts) or "*Not run yet.*"


def text_panel(result: Result) -> Panel:
    """For each query, the most helpful and the most harmful example by method."""
    methods: Mapping[str, Any] = result["panels"]["methods"]
    return [
        {name: [rows[k]["helpful"][0], rows[k]["harmful"][0]] for name, rows in methods.items()}
        for k in range(min(QUERIES, *map(len, methods.values())))
    ]


def _examples(panel: Panel) -> set[int]:
    return {example for by_method in panel for pair in by_method.values() for example in pair}


def read_texts(result: Result, experiment: Experiment) -> dict[str, Any]:
    """The texts of a panel, from the dataset: {"train" or "query": {index: text}}."""
    if experiment.name == "wikitext2":
        train, query = data.wikitext2_texts()
    else:
        name, _, count = experiment.make.args  # type: ignore[attr-defined]
        classes = CLASS_NAMES.get(name, data.GLUE[name][1])
        train, query = (
            [
                f"{classes[label].replace('_', ' ')}: {' / '.join(sentences)}"
                for sentences, label in zip(*split, strict=True)
            ]
            for split in data._glue(name, 160 if result["quick"] else count)
        )
    panel = text_panel(result)
    return {
        "recipe": result["recipe"],
        "query": {str(k): query[k][: 3 * MAX_LETTERS] for k in range(len(panel))},
        "train": {str(k): train[k][: 2 * MAX_LETTERS] for k in sorted(_examples(panel))},
    }


def text_panels(results: Results, folder: Path) -> str:
    """Tables of the texts in `folder`/texts."""
    parts = []
    for task in of_kind(results, "text"):
        result, file = results[task], folder / "texts" / f"{task}.json"
        texts = json.loads(file.read_text()) if file.is_file() else {}
        panel = text_panel(result)
        wanted = set(map(str, _examples(panel)))
        parts.append(f"**{title(task, result)}**, by the mean scores of {_models(result)}:")
        if texts.get("recipe") != result["recipe"] or not wanted <= set(texts["train"]):
            parts.append("*Not shown, because the dataset is missing.*")
            continue
        for k, by_method in enumerate(panel):
            rows = [
                [name, *(escaped(texts["train"][str(e)], MAX_LETTERS) for e in pair)]
                for name, pair in by_method.items()
            ]
            parts.append(f"*Query*: {escaped(texts['query'][str(k)], 2 * MAX_LETTERS)}")
            parts.append(table(["method", "most helpful", "most harmful"], rows))
    return "\n\n".join(parts) or "*Texts: not run yet.*"
