"""Stock models, with the structure and depth of the real ones and narrow layers: with layers="all",
at least 99 % of the trained parameters are tracked, and the rest is named with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.autograd import once

import whence

hf = pytest.importorskip("transformers")

IDS = [{"input_ids": torch.arange(k, k + 6) % 11} for k in range(4)]
LABELLED = [row | {"labels": k % 2} for k, row in enumerate(IDS)]
IMAGES = [{"pixel_values": torch.randn(3, 32, 32), "labels": k % 2} for k in range(4)]
LANGUAGE = whence.LanguageModeling, IDS
CLASSES = whence.Classification, LABELLED
PICTURES = whence.Classification, IMAGES
TOKENS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=24, n_positions=16, **TOKENS))


def llama() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 8}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **TOKENS))


def mixtral() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 16}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, num_hidden_layers=8, **TOKENS))


def bert() -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 48, "vocab_size": 50}
    return hf.BertForSequenceClassification(hf.BertConfig(**sizes))


def bert_masked() -> Any:
    """With the head that BERT is trained with, which is tied to the table and has a bias."""
    sizes = {"hidden_size": 24, "intermediate_size": 48, "vocab_size": 50}
    return hf.BertForMaskedLM(hf.BertConfig(**sizes))


def vit() -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 48, "image_size": 32}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes))


def resnet50() -> Any:
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128], "depths": [3, 4, 6, 3]}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes))


class Masked(whence.LanguageModeling):
    """The token at each position is predicted there."""

    def targets(self, batch: Any) -> torch.Tensor:
        return batch["input_ids"]


STOCK: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "GPT-2": (gpt2, *LANGUAGE),
    "Llama": (llama, *LANGUAGE),
    "Mixtral": (mixtral, *LANGUAGE),
    "BERT": (bert, *CLASSES),
    "BERT, masked": (bert_masked, Masked, IDS),
    "ViT": (vit, *PICTURES),
    "ResNet-50": (resnet50, *PICTURES),
}


@pytest.mark.parametrize("name", STOCK)
def test_at_least_99_percent_are_tracked(name: str) -> None:
    make, task, data = STOCK[name]
    torch.manual_seed(0)
    model = make()
    study = whence.Study(model, task(), data, once(model), layers="all")
    tracked = study.passes(study.runs[0], device=torch.device("cpu"), dtype=torch.float32)
    tracked = tracked["train"].tracked
    assert tracked.trained == sum(p.numel() for p in model.parameters())
    assert tracked.share >= 0.99, tracked.summary(20)
    last = str(study.describe()).splitlines()[-1]
    if tracked.excluded:  # each is named with its reason
        assert all(part.name in last and part.reason in last for part in tracked.excluded)
    else:
        assert last == f"all {tracked.trained:,} parameters are tracked"
