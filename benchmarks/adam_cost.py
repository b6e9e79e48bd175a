"""What SOURCE costs for AdamW: the exact form against plain SOURCE, and against the paper's form.

    python -m benchmarks.adam_cost [mlp cnn bert gpt] [--rounds 3] [--layers matrices]

Each model is trained on real data for a few epochs, once by SGD and once by AdamW, with six
checkpoints. `Source()` on the AdamW run is compared with `Source()` on the SGD run (of the same
model, data, curvature and segments) and with `Source.published()` on the AdamW run. Processor
seconds of whole attributions, from scratch and with cached factors, taken in turn; the fastest
round.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import whence
from experiments.tasks import data, models, recipes

EPOCHS, BATCH, CHECKPOINTS = 3, 32, 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.03, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
}
#: (method, optimizer of the run)
FORMS: dict[str, tuple[Callable[[], whence.Source], str]] = {
    "SGD": (lambda: whence.Source(segments=3), "SGD"),
    "AdamW, paper's form": (lambda: whence.Source.published(segments=3), "AdamW"),
    "AdamW": (lambda: whence.Source(segments=3), "AdamW"),
}


@dataclass(frozen=True)
class Case:
    model: nn.Module
    task: whence.Task
    train: TensorDataset
    query: TensorDataset


def _first(dataset: Any, count: int) -> TensorDataset:
    return TensorDataset(*(column[:count] for column in dataset.tensors))


def mlp() -> Case:
    """FashionMNIST, 784-512-256-10."""
    train, held_out = data.images("fashion_mnist")
    sets = _first(train, 6000), _first(held_out, 50)
    return Case(models.mlp(784, 512, 256, 10), whence.Classification(), *sets)


def cnn() -> Case:
    """CIFAR-10, a ResNet-9 of an eighth of the usual width."""
    train, held_out = data.cifar10()
    sets = _first(train, 500), _first(held_out, 20)
    return Case(models.ResNet9(width=8), whence.Classification(), *sets)


def bert() -> Case:
    """RTE, an encoder of three layers of width 192."""
    from transformers import BertConfig, BertForSequenceClassification

    train, held_out = data.glue("RTE", 64)
    config = BertConfig(
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=768,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = models.Encoder(BertForSequenceClassification(config))  # type: ignore[no-untyped-call]
    sets = _first(train, 250), _first(held_out, 20)
    return Case(model, models.TextClassification(), *sets)


def gpt() -> Case:
    """WikiText-2, a GPT-2 of four layers of width 192, with 2,000 words."""
    train, held_out = data.wikitext2(64)
    sets = recipes.frequent([_first(train, 250), _first(held_out, 20)], 2000)
    return Case(models.gpt2(2000, 4, 192, 3, 64), whence.LanguageModeling(), *sets)


CASES = {"mlp": mlp, "cnn": cnn, "bert": bert, "gpt": gpt}


def trained(case: Case, optimizer: torch.optim.Optimizer) -> whence.Run:
    """The run of a few epochs."""
    folder, count = tempfile.mkdtemp(), len(case.train)
    steps = EPOCHS * -(-count // BATCH)
    recorder = whence.Recorder(
        folder, case.model, optimizer, checkpoints=CHECKPOINTS, total_steps=steps
    )
    with recorder:
        for _ in range(EPOCHS):
            for some in torch.split(torch.randperm(count), BATCH):
                batch = [column[some] for column in case.train.tensors]
                optimizer.zero_grad()
                losses = case.task.losses(case.task.outputs(case.model, batch), batch)
                torch.autograd.backward(losses.mean())
                optimizer.step()
    return whence.Run.open(folder)


def measure(name: str, rounds: int, layers: str) -> dict[str, Any]:
    """Processor seconds of each form: from scratch, and with cached factors."""
    torch.manual_seed(0)
    case = CASES[name]()
    start = {key: value.clone() for key, value in case.model.state_dict().items()}
    runs = {}
    for kind, optimizer in OPTIMIZERS.items():
        case.model.load_state_dict(start)
        torch.manual_seed(1)
        runs[kind] = trained(case, optimizer(case.model.parameters()))
    case.model.eval()
    seconds: dict[str, dict[str, list[float]]] = {
        form: {"from scratch": [], "scores": []} for form in FORMS
    }
    steps: dict[str, Any] = {}
    for _ in range(rounds):
        for form, (method, kind) in FORMS.items():
            cache = tempfile.mkdtemp()
            study = whence.Study(
                case.model, case.task, case.train, runs[kind], layers=layers, cache=cache
            )
            for times in seconds[form].values():
                begun = time.process_time()
                scores = method().attribute(study, case.query, progress=False)
                times.append(time.process_time() - begun)
            steps[form] = scores.diagnostics.get("lanczos")
    best = {f: {work: min(times) for work, times in s.items()} for f, s in seconds.items()}
    sizes = {"train": len(case.train), "query": len(case.query), "rounds": rounds}
    return sizes | {"layers": layers, "seconds": best, "lanczos": steps["AdamW"]}


def ratios(seconds: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The exact form's time over that of each other form."""
    return {
        form: {work: seconds["AdamW"][work] / time for work, time in times.items()}
        for form, times in seconds.items()
        if form != "AdamW"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", default="matrices")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in chosen.cases:
        result = measure(name, chosen.rounds, chosen.layers)
        print(name, json.dumps(result), flush=True)
        print("  ", json.dumps(ratios(result["seconds"])), flush=True)


if __name__ == "__main__":
    main()
