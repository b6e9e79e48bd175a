"""The estimate before an attribution, next to counted operations and measured processor time.

    python -m benchmarks.estimated [--adamw]

Operations are counted by PyTorch (`FlopCounterMode`) while the work is done. Seconds are those of
another, uncounted call. Results go to benchmarks/results/estimated.json, and from there to
docs/cost.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset, TensorDataset, default_collate
from torch.utils.flop_counter import FlopCounterMode

import whence
from benchmarks.models import GPT, documents, images, mlp, resnet9, run_of, vectors
from benchmarks.report import RESULTS
from experiments.tasks.machine import machine
from whence.operators import cost

Case = tuple[nn.Module, whence.Task, Any, Any]  # model, task, training data, queries
METHODS: dict[str, Callable[[], Any]] = {
    "SOURCE": lambda: whence.Source(segments=3),
    "influence": lambda: whence.Influence.published(1e-3),
    "TracIn": whence.TracIn,
}

#: methods that take Lanczos steps after AdamW
AFTER_ADAMW: dict[str, Callable[[], Any]] = {
    "SOURCE": lambda: whence.Source(segments=3),
    "influence": whence.Influence,
}


class Labelled(Dataset[dict[str, Any]]):
    """Token ids with a class, as a transformer takes them."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"input_ids": self.ids[k], "labels": k % 2}


def _mlp(scale: int) -> Case:
    return mlp(), whence.Classification(), vectors(64 * scale, 0), vectors(4 * scale, 1)


def _resnet9(scale: int) -> Case:
    return resnet9(), whence.Classification(), images(2 * scale, 0), images(4, 1)


def _texts(n: int, seed: int, vocabulary: int) -> TensorDataset:
    return documents(n, seed, vocabulary, length=32)


def _gpt(scale: int) -> Case:
    model = GPT(depth=2, width=64, vocabulary=2000, length=32)
    task = whence.LanguageModeling("sum")
    return model, task, _texts(8 * scale, 0, 2000), _texts(4, 1, 2000)


def _bert(scale: int) -> Case:
    import transformers

    config: Any = transformers.BertConfig(
        vocab_size=500,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
    )
    config._attn_implementation = "eager"  # whose products are counted
    model: Any = transformers.BertForSequenceClassification(config)  # type: ignore[no-untyped-call]
    train, query = (Labelled(_texts(n, n, 500).tensors[0]) for n in (8 * scale, 4))
    return model, whence.Classification(), train, query


def _gpt2(scale: int) -> Case:
    import transformers

    config: Any = transformers.GPT2Config(
        vocab_size=4000, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    config._attn_implementation = "eager"
    model: Any = transformers.GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    return model, whence.LanguageModeling(), _texts(8 * scale, 0, 4000), _texts(4, 1, 4000)


def _lora(scale: int) -> Case:
    from peft import LoraConfig, get_peft_model

    model, task, train, query = _gpt2(scale)
    base: Any = model
    adapted: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"]))
    return adapted, task, train, query


CASES: dict[str, Callable[[int], Case]] = {
    "MLP 784-512-256-10": _mlp,
    "ResNet-9": _resnet9,
    "GPT, tied head": _gpt,
    "BERT": _bert,
    "GPT-2": _gpt2,
    "GPT-2 with LoRA": _lora,
}


def study_of(case: str, scale: int) -> tuple[whence.Study, Any]:
    """A study of six checkpoints, and its queries."""
    torch.manual_seed(0)
    model, task, train, query = CASES[case](scale)
    trained = [[name for name, p in model.named_parameters() if p.requires_grad]]
    run = run_of(model)
    weights, steps = [c.weights() for c in run.checkpoints], [c.step for c in run.checkpoints]
    run = whence.Run.from_checkpoints(weights, steps, 0.01, groups=trained)
    return whence.Study(model, task, train, run, layers="matrices"), query


def study_after_adamw(case: str, scale: int, folder: Path) -> tuple[whence.Study, Any]:
    """The same of a training of 60 steps, with its second moments."""
    torch.manual_seed(0)
    model, task, train, query = CASES[case](scale)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with whence.Recorder(folder, model, optimizer, checkpoints=6, total_steps=60) as recorder:
        for k in range(60):
            indices = torch.arange(8 * k, 8 * k + 8) % len(train)
            batch: Any = default_collate([train[int(i)] for i in indices])
            optimizer.zero_grad()
            loss: Any = task.losses(task.outputs(model, batch), batch).mean()
            loss.backward()
            recorder.step(indices)
            optimizer.step()
    return whence.Study(model, task, train, folder, layers="matrices"), query


def counted(case: str, method: str, scale: int) -> tuple[float, float]:
    """(estimated, counted) operations."""
    return counted_of(METHODS[method](), *study_of(case, scale))[:2]


def counted_of(method: Any, study: whence.Study, query: Any) -> tuple[float, float, Any]:
    """(estimated, counted) operations, and the diagnostics."""
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        about = method.attribute(study, query).diagnostics
    return about["estimate"]["operations"], counter.get_total_flops(), about


def timed(method: Any, study: whence.Study, query: Any) -> tuple[float, float]:
    """(estimated, measured) processor seconds."""
    about = method.attribute(study, query).diagnostics
    return about["estimate"]["seconds"], sum(about["cpu_seconds"].values())


def after_adamw(case: str, method: str) -> dict[str, Any]:
    """The same, with the most Lanczos steps of a segment."""
    make, scale = AFTER_ADAMW[method], 2 if case.startswith("MLP") else 8
    with tempfile.TemporaryDirectory() as folder:
        study, query = study_after_adamw(case, scale, Path(folder) / "run")
        *operations, about = counted_of(make(), study, query)
        fresh, query = study_after_adamw(case, scale, Path(folder) / "again")
        seconds = timed(make(), fresh, query)
    return {
        "operations": operations,
        "seconds": seconds,
        "lanczos": about["lanczos"]["iterations"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adamw", action="store_true", help="only the cases after AdamW")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    # rates of processor time, like what is measured: others may use the machine
    vars(cost)["time"] = SimpleNamespace(perf_counter=time.process_time)
    warnings.simplefilter("ignore")
    path = RESULTS / "estimated.json"
    results: dict[str, Any] = json.loads(path.read_text())
    if not chosen.adamw:
        results |= {"machine": machine(), "cases": {}}
        for case in CASES:
            scale = 2 if case == "ResNet-9" else 8
            # the others of ResNet-9 take minutes
            for method in METHODS if case != "ResNet-9" else ["influence"]:
                operations = counted(case, method, scale)
                seconds = timed(METHODS[method](), *study_of(case, scale))
                result = {"operations": operations, "seconds": seconds}
                results["cases"][f"{method}, {case}"] = result
                print(case, method, operations[0] / operations[1], *seconds, flush=True)
    results["after AdamW"] = {"machine": machine(), "cases": {}}
    for case in [case for case in CASES if case != "ResNet-9"]:
        for method in AFTER_ADAMW:
            result = after_adamw(case, method)
            results["after AdamW"]["cases"][f"{method} after AdamW, {case}"] = result
            print(case, method, result, flush=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
