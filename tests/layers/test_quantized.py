"""LoRA on a frozen base in 4 bits, as bitsandbytes stores it: scores are those of its values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import models
from support.comparing import close
from torch import Tensor, nn

import whence

TRAIN, QUERY = models.vectors(12), models.vectors(3, seed=1)
EXACT: dict[str, Any] = {"dtype": torch.float64, "progress": False}


class Linear4bit(nn.Linear):
    """As bitsandbytes.nn.Linear4bit: two weights in a byte of a flat parameter that cannot have a
    gradient, scales that only the state dict shows, and a forward of its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        numbers = (linear.weight.detach() / scale).round().to(torch.int16).add(8).flatten()
        packed = (numbers[::2] * 16 + numbers[1::2]).to(torch.uint8).unsqueeze(1)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
        self.scale = scale

    def values(self) -> Tensor:
        packed = self.weight.squeeze(1).to(torch.int16)
        numbers = torch.stack([packed // 16, packed % 16], 1).flatten() - 8
        return numbers.reshape(self.out_features, -1) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.values().to(x), self.bias.to(x))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.scale.clone()


def base() -> nn.Module:
    torch.manual_seed(0)
    return models.mlp((4, 6, 6, 3), inplace=False)


def adapted(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


def quantized(model: nn.Module, plain: bool = False) -> nn.Module:
    """With its linear layers in 4 bits, or in the values that these 4 bits have."""
    for name, module in list(model.named_children()):
        if isinstance(module, nn.Linear):
            small = Linear4bit(module)
            if plain:
                module.weight.data = small.values()
            setattr(model, name, module if plain else small)
    return model


def record(folder: Path, model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with whence.Recorder(folder, model, optimizer, checkpoints=[2, 4]):
        for _ in range(4):
            optimizer.zero_grad()
            x, y = TRAIN.tensors
            nn.functional.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize(
    "method", [whence.Source(segments=2), whence.Source.published(2)], ids=repr
)
def test_a_quantized_base_has_the_scores_of_its_values(method: Any, tmp_path: Path) -> None:
    scores = []
    for name, plain in (("small", False), ("plain", True)):
        model = record(tmp_path / name, adapted(quantized(base(), plain)))
        study = whence.Study(model, whence.Classification(), TRAIN, tmp_path / name)
        scores.append(method.attribute(study, QUERY, **EXACT))
    assert np.abs(scores[1].values).max() > 1e-4
    close(scores[0].values, scores[1].values, 1e-9)


def test_another_base_is_refused_by_name(tmp_path: Path) -> None:
    """Its scales are only shown by the state dict, so they cannot be loaded into the model."""
    model = record(tmp_path / "run", adapted(quantized(base())))
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, Linear4bit):
            module.scale = module.scale * 2
    study = whence.Study(other, whence.Classification(), TRAIN, tmp_path / "run")
    with pytest.raises(whence.errors.InvalidInput, match=r"base_layer\.weight\.absmax .*quantized"):
        whence.TracIn().attribute(study, QUERY, **EXACT)


def test_a_quantized_layer_is_left_out_by_name(tmp_path: Path) -> None:
    """Under a head that is trained, without adapters."""
    model = quantized(base())
    model[4] = nn.Linear(6, 3)
    record(tmp_path / "run", model.double())
    study = whence.Study(model, whence.Classification(), TRAIN, tmp_path / "run")
    passes = study.passes(study.runs[0], device=torch.device("cpu"), dtype=torch.float64)
    excluded = {e.name: e.reason for e in passes["train"].tracked.excluded}
    assert excluded == dict.fromkeys(("0", "2"), "frozen: no update of the run moved it")
