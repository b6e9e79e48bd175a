"""What a Hugging Face Trainer saves in a checkpoint folder: weights and optimizer.pt."""

from __future__ import annotations

import itertools
import json
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from whence.persist.identity import sha256_of
from whence.run import optimizers
from whence.run.checkpoint import RunError, TensorFile, file_sha256, plain_names, read_tensors

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Which parameters the Trainer spares weight decay, newest rule first: by name, and by module.
SPARED_NAMES = (
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)",
    r"bias|layernorm|rmsnorm",
    r"bias",
)
SPARED_MODULES: tuple[Callable[[nn.Module], bool], ...] = (
    lambda module: isinstance(module, nn.LayerNorm),
    lambda module: type(module).__name__.endswith(("LayerNorm", "RMSNorm")),
)
# Optimizers by what only their groups say, and where their state has second moments. The second
# AdamW is the one transformers had before version 5.
SIGNS = (
    ("adam", {"betas", "eps", "amsgrad"}, "exp_avg_sq"),
    ("adamw", {"betas", "eps", "correct_bias"}, "exp_avg_sq"),
    ("rmsprop", {"alpha", "eps", "centered", "momentum"}, "square_avg"),
    ("sgd", {"momentum", "dampening", "nesterov"}, None),
)
# What the groups of any of them may say besides.
UNTOLD = {"lr", "initial_lr", "params", "param_names"}
SHARED = UNTOLD | {"weight_decay", "maximize", "foreach", "capturable", "differentiable", "fused"}

Names = list[list[list[str]]]  # of every parameter of every group; several where it is tied


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it holds no object")
    return content


# --- weights ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights(TensorFile):
    """Weights as `save_pretrained` leaves them: in one file or in several, tied ones once."""

    parts: tuple[TensorFile, ...] = field(default=(), compare=False, repr=False)
    names: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    renamed: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def find(cls, folder: Path, model: nn.Module) -> Weights:
        """The weights in a checkpoint folder, after a look at whether they are the model's."""
        path, paths = _weight_files(folder)
        own = model.state_dict()
        renamed = _renamed(model, own)
        shapes = {
            renamed.get(name, name): shape for p in paths for name, shape in _shapes(p).items()
        }
        plain = plain_names(own)
        expected = {plain[name]: tuple(tensor.shape) for name, tensor in own.items()}
        aliases = {
            name: kept[0]
            for names in optimizers.names_of(model).values()
            if (kept := [name for name in names if name in shapes])
            for name in names
            if name not in shapes
        }
        shapes |= {alias: shapes[name] for alias, name in aliases.items()}
        problems = [f"no {name}" for name in expected.keys() - shapes.keys()]
        problems += [
            f"{name} of shape {shapes[name]}, not {shape}"
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ]
        if problems:
            raise RunError(
                f"{path} is of another model: it has {', '.join(sorted(problems)[:3])}. Give the "
                "model that was trained, as it was in training"
            )
        strange = sorted(shapes.keys() - expected.keys())
        if strange:
            warnings.warn(
                f"{path} has {', '.join(strange[:3])}, which the model has not: left out",
                stacklevel=3,
            )
        parts = tuple(TensorFile.adopt(p) for p in paths)
        sha256 = parts[0].sha256
        if len(parts) > 1:
            sha256 = sha256_of(*(part.sha256 for part in parts))
        return cls(sha256, path, aliases, parts=parts, names=frozenset(expected), renamed=renamed)

    def load(self) -> dict[str, Tensor]:
        tensors = {
            self.renamed.get(name, name): t
            for part in self.parts
            for name, t in part.load().items()
        }
        tensors |= {alias: tensors[name] for alias, name in self.aliases.items()}
        return {name: tensor for name, tensor in tensors.items() if name in self.names}


def _renamed(model: nn.Module, own: Mapping[str, Tensor]) -> dict[str, str]:
    """{name in a file: name in the model} where transformers 5 saves under older names."""
    loading = sys.modules.get("transformers.core_model_loading")
    if loading is None or not hasattr(model, "save_pretrained"):
        return {}
    places = {t.data_ptr(): name for name, t in own.items()}
    saved = loading.revert_weight_conversion(model, dict(own))
    return {
        k: places[t.data_ptr()]
        for k, t in saved.items()
        if k not in own and t.data_ptr() in places and own[places[t.data_ptr()]].shape == t.shape
    }


def _weight_files(folder: Path) -> tuple[Path, list[Path]]:
    """What stands for a checkpoint's weights, and the files they are in."""
    path = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
    if path is None:
        raise RunError(
            f"{folder} has no weights ({' or '.join(WEIGHTS[::2])}): "
            + (
                "an adapter alone is no checkpoint; record with RecorderCallback instead"
                if any(folder.glob("**/adapter_model.*"))
                else "restore them from a copy, or remove the folder to make the run without it"
            )
        )
    if path.suffix != ".json":
        return path, [path]
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise RunError(f"{path} is damaged: it maps no weights to files")
    # Only ever names inside the folder, whatever the index says.
    paths = [folder / name for name in sorted({Path(str(name)).name for name in listed.values()})]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise RunError(
            f"{folder} lacks {', '.join(missing)}, which {path.name} lists: restore it from a "
            "copy, or remove the folder to make the run without it"
        )
    return path, paths


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if path.suffix != ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in read_tensors(path).items()}
    try:
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in keys}
    except Exception as error:
        raise RunError(f"{path} cannot be read as a checkpoint: {error}") from error
    plain = plain_names(shapes)
    return {plain[name]: shape for name, shape in shapes.items()}


# --- optimizer.pt -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer.pt, never unpickled, with the names of the parameters it only numbers."""

    path: Path
    state: Mapping[int, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    names: Names

    @classmethod
    def read(cls, path: Path, model: nn.Module) -> SavedOptimizer:
        state, groups = _state_dict(path)
        parameters = {names[0]: p for p, names in trained(model)}
        for names in _candidates(groups, model):
            saved = cls(path, state, groups, names)
            if saved._fits(parameters):
                return saved
        raise RunError(
            f"{path} does not fit the model: its groups have {[len(g['params']) for g in groups]} "
            f"parameters, which are not the {len(parameters)} trainable ones of "
            f"{type(model).__name__} as the Trainer groups them, or have other shapes. Freeze what "
            "was frozen in training (requires_grad_(False)); for an optimizer with groups of its "
            "own use RecorderCallback, or Run.from_checkpoints"
        )

    @property
    def updates(self) -> int | None:
        """How many updates it has counted."""
        counts = [int(held["step"]) for held in self.state.values() if "step" in held]
        return max(counts, default=None)

    @property
    def flat_names(self) -> list[list[str]]:
        return [[name for names in group for name in names] for group in self.names]

    def kind(self) -> str:
        """ "sgd", "adam", "adamw", "rmsprop" or, with a warning, "unknown"."""
        group, held = self.groups[0], {key for state in self.state.values() for key in state}
        # Before torch 2.7 Adam and AdamW look alike, and the Trainer's is AdamW.
        decoupled = group.get("decoupled_weight_decay", True)
        for name, signs, second in SIGNS:
            told = group.keys() - SHARED - {"decoupled_weight_decay"}
            if told == signs and (second is None or second in held or not held):
                return "adamw" if name == "adam" and decoupled else name
        warnings.warn(
            f"{self.path} is of no optimizer known here (SGD, Adam, AdamW, RMSprop): its groups "
            f"have {sorted(group.keys() - SHARED)}, its state {sorted(held)}. No second moments "
            "are taken from it",
            stacklevel=3,
        )
        return "unknown"

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Every group's settings but the learning rate, as plain JSON values."""
        return [
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in group.items()
                if key not in UNTOLD
                and isinstance(value, (bool, int, float, str, list, tuple, type(None)))
            }
            for group in self.groups
        ]

    def rates(self, key: str) -> list[float]:
        return [float(group.get(key) or 0.0) for group in self.groups]

    def second_moments(self) -> dict[str, Tensor]:
        """{parameter: v̂}, as `optimizers.second_moments`, under all names of tied parameters."""
        moments: dict[str, Tensor] = {}
        for group, names, number in self._numbered():
            held = self.state.get(number, {})
            if "square_avg" in held:
                moments |= dict.fromkeys(names, held["square_avg"].clone())
            elif "exp_avg_sq" in held:
                second = held.get("max_exp_avg_sq", held["exp_avg_sq"])
                decayed = float(group["betas"][1]) ** float(held["step"])
                corrected = 1 - decayed if group.get("correct_bias", True) else 1.0
                moments |= dict.fromkeys(names, second / corrected)
        return moments

    def _numbered(self) -> Iterator[tuple[dict[str, Any], list[str], int]]:
        """Every parameter's group, names and number."""
        for group, own in zip(self.groups, self.names, strict=True):
            for names, number in zip(own, group["params"], strict=True):
                yield group, names, number

    def _fits(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        counts = [len(group["params"]) for group in self.groups]
        return counts == [len(own) for own in self.names] and all(
            held.shape in ((), parameters[names[0]].shape)
            for _, names, number in self._numbered()
            for key, held in self.state.get(number, {}).items()
            if isinstance(held, Tensor) and key.startswith(("exp_avg", "square_avg", "momentum"))
        )


@dataclass(frozen=True)
class Moments(TensorFile):
    """Second moments in an optimizer.pt, taken out of it whenever they are asked for."""

    names: Names = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def of(cls, saved: SavedOptimizer) -> Moments:
        return cls(file_sha256(saved.path), saved.path, names=saved.names)

    def load(self) -> dict[str, Tensor]:
        assert self.path is not None
        if file_sha256(self.path) != self.sha256:
            raise RunError(f"{self.path} was altered after the run was made of it: make it again")
        return SavedOptimizer(self.path, *_state_dict(self.path), self.names).second_moments()


def trained(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """The parameters that are not frozen, in the model's order, and their names."""
    names = optimizers.names_of(model)
    return [(p, names[id(p)]) for p in model.parameters() if p.requires_grad]


def factors(saved: Sequence[SavedOptimizer]) -> list[float]:
    """Every group's learning rate over the first group's, which is the one that is logged."""
    found: list[float] | None = None
    for one, key in itertools.product(saved, ("initial_lr", "lr")):
        rates = one.rates(key)
        if not rates[0]:
            continue
        ratios = [rate / rates[0] for rate in rates]
        if found is not None and not np.allclose(ratios, found, rtol=1e-6):
            raise RunError(
                f"the learning rates of the parameter groups in {one.path} do not move together, "
                "and only the first one's is logged: use RecorderCallback, or Run.from_checkpoints"
            )
        found = ratios
    return found or [1.0] * len(saved[0].groups)


def _state_dict(path: Path) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    try:
        mapped = zipfile.is_zipfile(path)  # then tensors are read when they are used
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise RunError(f"{path} cannot be read, or not without unpickling: {error}") from error
    try:
        state, groups = dict(saved["state"]), list(saved["param_groups"])
        if groups and all({"lr", "params"} <= group.keys() for group in groups):
            return state, groups
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise RunError(f"{path} holds no optimizer's state_dict()")


def _candidates(groups: Sequence[Mapping[str, Any]], model: nn.Module) -> Iterator[Names]:
    """What the parameters may be that groups only number: the groups are named ones, one of
    everything, or the Trainer's two, with weight decay and without."""
    parameters = trained(model)
    if all("param_names" in group for group in groups):
        known = {name: names for _, names in parameters for name in names}
        listed = [plain_names(group["param_names"]).values() for group in groups]
        if all(name in known for group in listed for name in group):
            yield [[known[name] for name in group] for group in listed]
    if len(groups) == 1:
        yield [[names for _, names in parameters]]
    if len(groups) == 2:
        for pattern, spares in itertools.product(SPARED_NAMES, SPARED_MODULES):
            inside = {id(p) for m in model.modules() if spares(m) for p in m.parameters()}
            split: Names = [[], []]
            for p, names in parameters:
                spared = id(p) in inside or re.search(pattern, names[0].lower()) is not None
                split[spared].append(names)
            yield split
