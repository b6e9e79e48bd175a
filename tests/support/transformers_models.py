"""Tiny Hugging Face models with seeded random weights. `settings` are those of the model's config.

transformers is imported by the call: test files without it skip.
"""

from __future__ import annotations

from typing import Any

import torch


def bert(**settings: Any) -> Any:
    import transformers as hf

    plain = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "max_position_embeddings": 16,
    }
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**(plain | settings)))


def gpt2(**settings: Any) -> Any:
    import transformers as hf

    plain = {
        "vocab_size": 20,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**(plain | settings)))


def llama(**settings: Any) -> Any:
    """Two heads share one of keys and values; the output layer is not tied to the embedding."""
    import transformers as hf

    plain = {
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8,
    }
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**(plain | settings)))
