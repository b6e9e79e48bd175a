"""Stock models, with the structure and depth of the real ones and narrow layers: with layers="all",
at least 99 % of the trained parameters are tracked, and the rest is named with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.autograd import EXACT, of_module, once, products

import whence

hf = pytest.importorskip("transformers")

IDS = [{"input_ids": torch.arange(k, k + 6) % 11} for k in range(4)]
LABELLED = [row | {"labels": k % 2} for k, row in enumerate(IDS)]
IMAGES = [{"pixel_values": torch.randn(3, 32, 32), "labels": k % 2} for k in range(4)]
TRANSLATED = [row | {"decoder_input_ids": row["input_ids"].flip(0)[:5]} for row in IDS]
TRANSLATED = [row | {"labels": row["decoder_input_ids"]} for row in TRANSLATED]
PAIRS = whence.LanguageModeling, TRANSLATED
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


def opt() -> Any:
    sizes = {"hidden_size": 24, "ffn_dim": 48, "word_embed_proj_dim": 24, "num_attention_heads": 4}
    return hf.OPTForCausalLM(hf.OPTConfig(**sizes, max_position_embeddings=16, **TOKENS))


def t5() -> Any:
    sizes = {"d_model": 24, "d_kv": 4, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(**sizes, vocab_size=50, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config)


def qwen2_moe() -> Any:
    """With experts that all tokens pass, beside those that a router chooses."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**sizes, num_experts_per_tok=2, **TOKENS))


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
    "OPT": (opt, *LANGUAGE),
    "T5": (t5, *PAIRS),
    "Qwen2-MoE": (qwen2_moe, *LANGUAGE),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", STOCK)
def test_tracin_is_the_product_of_gradients(name: str) -> None:
    """With one checkpoint and rate 1, by autograd, one example at a time."""
    make, task, data = STOCK[name]
    torch.manual_seed(0)
    model = make()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    data = [
        {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in x.items()}
        for x in data
    ]
    study = whence.Study(model, task(), data, once(model), layers="all")
    scores = whence.TracIn().attribute(study, data[:2], batch_size=3, **EXACT)
    left_out = {part["name"] for part in scores.excluded}
    names = [n for n, _ in model.named_parameters() if of_module(n) not in left_out]
    expected = products(model, names, data, data[:2], task())
    assert abs(scores.values - expected).max() <= 1e-8 * abs(expected).max()
