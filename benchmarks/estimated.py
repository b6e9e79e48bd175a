"""The estimate before an attribution, next to counted operations and measured processor time.

    python -m benchmarks.estimated

Operations are counted by PyTorch (`FlopCounterMode`) while the work is done. Seconds are those of
another, uncounted call. Results go to benchmarks/results/estimated.json, and from there to
docs/cost.md.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset, TensorDataset
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


def counted(case: str, method: str, scale: int) -> tuple[float, float]:
    """(estimated, counted) operations."""
    study, query = study_of(case, scale)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        scores = METHODS[method]().attribute(study, query)
    return scores.diagnostics["estimate"]["operations"], counter.get_total_flops()


def timed(case: str, method: str, scale: int) -> tuple[float, float]:
    """(estimated, measured) processor seconds."""
    study, query = study_of(case, scale)
    about = METHODS[method]().attribute(study, query).diagnostics
    return about["estimate"]["seconds"], sum(about["cpu_seconds"].values())


def main() -> None:
    torch.set_num_threads(1)
    # rates of processor time, like what is measured: others may use the machine
    vars(cost)["time"] = SimpleNamespace(perf_counter=time.process_time)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    for case in CASES:
        scale = 2 if case == "ResNet-9" else 8
        for method in METHODS if case != "ResNet-9" else ["influence"]:  # the others take minutes
            operations, seconds = counted(case, method, scale), timed(case, method, scale)
            results["cases"][f"{method}, {case}"] = {
                "operations": operations,
                "seconds": seconds,
            }
            print(case, method, operations[0] / operations[1], *seconds, flush=True)
    (RESULTS / "estimated.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
