"""The files in a checkpoint folder of a Hugging Face Trainer: weights and optimizer.pt."""

from __future__ import annotations

import itertools
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from whence.errors import warn
from whence.persist.identity import sha256_of
from whence.run import optimizers
from whence.run.checkpoint import RunError, TensorFile, file_sha256, plain_names, read_tensors

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")  # of PEFT
# Parameters to which the Trainer applies no weight decay: those of nn.LayerNorm, and by name.
NO_DECAY_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
# For each optimizer: the keys that only its groups have, and the second moments in its state.
OPTIMIZER_SIGNATURES = (
    ("adam", {"betas", "eps", "amsgrad"}, "exp_avg_sq"),
    ("rmsprop", {"alpha", "eps", "centered", "momentum"}, "square_avg"),
    ("sgd", {"momentum", "dampening", "nesterov"}, None),
)
# Keys that are no settings of the optimizer, and keys that several optimizers share.
UNINFORMATIVE_KEYS = {"lr", "initial_lr", "params", "param_names"}
SHARED_KEYS = UNINFORMATIVE_KEYS | {
    "weight_decay",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}

Names = list[list[list[str]]]  # of every parameter of every group; a tied one has several


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it does not hold an object")
    return content


# --- weights ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PretrainedWeights(TensorFile):
    """Weights written by `save_pretrained`, in one file or several. Tied weights are saved once.

    Where only an adapter was saved (PEFT), the frozen weights are those of the given model, `base`.
    """

    parts: tuple[TensorFile, ...] = field(default=(), compare=False, repr=False)
    names: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    renamed: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def find(cls, folder: Path, model: nn.Module) -> PretrainedWeights:
        """The weights in a checkpoint folder. Raises RunError if they do not fit the model."""
        adapted = hasattr(model, "peft_config")
        path, paths = _weight_files(folder, adapted)
        state = model.state_dict()
        of_adapter = path.name in ADAPTER_FILES
        renamed = _adapter_names(model, state) if of_adapter else _renamed(model, state)
        shapes = {
            renamed.get(name, name): shape for p in paths for name, shape in _shapes(p).items()
        }
        plain = plain_names(state)
        expected = {plain[name]: tuple(tensor.shape) for name, tensor in state.items()}
        aliases = {
            name: saved[0]
            for names in optimizers.names_of(model).values()
            if (saved := [name for name in names if name in shapes])
            for name in names
            if name not in shapes
        }
        shapes |= {alias: shapes[name] for alias, name in aliases.items()}
        base = _frozen(model, state, shapes) if of_adapter else {}
        shapes |= {name: tuple(tensor.shape) for name, tensor in base.items()}
        problems = [f"no {name}" for name in expected.keys() - shapes.keys()]
        problems += [
            f"{name} of shape {shapes[name]}, not {shape}"
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ]
        if problems:
            raise RunError(
                f"{path} is a checkpoint of another model: it has "
                f"{', '.join(sorted(problems)[:3])}. Give the model that was trained, as it was in "
                "training"
            )
        unknown = sorted(shapes.keys() - expected.keys())
        if unknown:
            warn(
                f"{path} has {', '.join(unknown[:3])}, which the model does not have: ignored",
                stacklevel=3,
            )
        parts = tuple(TensorFile.adopt(p) for p in paths)
        sha256 = parts[0].sha256
        if base:
            parts = (TensorFile.adopt(base), *parts)
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

    def open(self) -> Mapping[str, Tensor]:
        return self.load()


def _renamed(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
    """{name in a file: name in the model}, for weights that transformers 5 saves under the names
    of earlier versions."""
    loading = sys.modules.get("transformers.core_model_loading")
    if loading is None or not hasattr(model, "save_pretrained"):
        return {}
    names = {t.data_ptr(): name for name, t in state.items()}
    saved = loading.revert_weight_conversion(model, dict(state))
    return {
        saved_name: names[t.data_ptr()]
        for saved_name, t in saved.items()
        if saved_name not in state
        and t.data_ptr() in names
        and state[names[t.data_ptr()]].shape == t.shape
    }


def _adapter_names(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
    """{name in an adapter's file: name in the model}, as PEFT leaves out the adapter's own name."""
    from peft import get_peft_model_state_dict

    names = {t.data_ptr(): name for name, t in state.items()}
    saved = get_peft_model_state_dict(model, dict(state), save_embedding_layers=False)
    return {name: names[t.data_ptr()] for name, t in saved.items() if t.data_ptr() in names}


def _frozen(
    model: nn.Module, state: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The tensors that an adapter's file does not hold: all must be frozen."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    missing = sorted(trained - saved.keys())
    if missing:
        raise RunError(
            f"{missing[0]} is trained and not in the adapter's file: give the model as it was in "
            "training, with the same parameters frozen"
        )
    return {name: tensor for name, tensor in state.items() if name not in saved}


def _weight_files(folder: Path, adapted: bool) -> tuple[Path, list[Path]]:
    """The file or index that represents a checkpoint's weights, and all files that hold them.

    Args:
        adapted: whether the model has an adapter, so that the adapter's weights are enough.
    """
    known = [*WEIGHT_FILES, *(ADAPTER_FILES if adapted else ())]
    path = next((folder / name for name in known if (folder / name).exists()), None)
    if path is None:
        raise RunError(
            f"{folder} has no weights ({' or '.join(WEIGHT_FILES[::2])}): "
            + (
                "it holds only an adapter; give the model with its adapter (a PeftModel)"
                if any(folder.glob("**/adapter_model.*"))
                else "restore them from a copy, or delete the folder to build the run without it"
            )
        )
    if path.suffix != ".json":
        return path, [path]
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise RunError(f"{path} is damaged: it maps no weights to files")
    # Take file names only: the index must not lead to files outside the folder.
    paths = [folder / name for name in sorted({Path(str(name)).name for name in listed.values()})]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise RunError(
            f"{folder} lacks {', '.join(missing)}, which {path.name} lists: restore it from a "
            "copy, or delete the folder to build the run without it"
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
    """The contents of an optimizer.pt, read without unpickling, and the names of its parameters,
    which the file only numbers."""

    path: Path
    state: Mapping[int, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    names: Names

    @classmethod
    def read(cls, path: Path, model: nn.Module) -> SavedOptimizer:
        state, groups = _state_dict(path)
        parameters = {names[0]: p for p, names in trainable_parameters(model)}
        for names in _candidates(groups, model):
            saved = cls(path, state, groups, names)
            if saved._fits(parameters):
                return saved
        raise RunError(
            f"{path} does not fit the model: its groups have {[len(g['params']) for g in groups]} "
            f"parameters, which do not match the {len(parameters)} trainable parameters of "
            f"{type(model).__name__} as the Trainer groups them. Freeze the parameters that were "
            "frozen in training (requires_grad_(False)); for an optimizer with other groups use "
            "RecorderCallback, or Run.from_checkpoints"
        )

    @property
    def updates(self) -> int | None:
        """The number of updates that the optimizer counted."""
        counts = [int(entry["step"]) for entry in self.state.values() if "step" in entry]
        return max(counts, default=None)

    @property
    def flat_names(self) -> list[list[str]]:
        return [[name for names in group for name in names] for group in self.names]

    def kind(self) -> str:
        """ "sgd", "adam", "adamw", "rmsprop" or, with a warning, "unknown"."""
        group, in_state = self.groups[0], {key for entry in self.state.values() for key in entry}
        # Before torch 2.7 Adam and AdamW look alike, and the Trainer's is AdamW.
        decoupled = group.get("decoupled_weight_decay", True)
        distinctive = group.keys() - SHARED_KEYS
        for name, keys, moments in OPTIMIZER_SIGNATURES:
            if distinctive == keys and (moments is None or moments in in_state or not in_state):
                return "adamw" if name == "adam" and decoupled else name
        warn(
            f"{self.path} belongs to an unknown optimizer (not SGD, Adam, AdamW or RMSprop): its "
            f"groups have {sorted(distinctive)}, its state {sorted(in_state)}. The run has no "
            "second moments",
            stacklevel=3,
        )
        return "unknown"

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Every group's settings except the learning rate, as plain JSON values."""
        return [
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in group.items()
                if key not in UNINFORMATIVE_KEYS
                and isinstance(value, (bool, int, float, str, list, tuple, type(None)))
            }
            for group in self.groups
        ]

    def rates(self, key: str) -> list[float]:
        return [float(group.get(key) or 0.0) for group in self.groups]

    def second_moments(self) -> dict[str, Tensor]:
        """{parameter: v̂}, with an entry for every name of a tied parameter."""
        moments: dict[str, Tensor] = {}
        for group, names, number in self._numbered():
            moment = optimizers.second_moment(self.state.get(number, {}), group)
            if moment is not None:
                moments |= dict.fromkeys(names, moment.clone())
        return moments

    def _numbered(self) -> Iterator[tuple[dict[str, Any], list[str], int]]:
        """The group, names and number of every parameter."""
        for group, group_names in zip(self.groups, self.names, strict=True):
            for names, number in zip(group_names, group["params"], strict=True):
                yield group, names, number

    def _fits(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        counts = [len(group["params"]) for group in self.groups]
        return counts == [len(group) for group in self.names] and all(
            value.shape in ((), parameters[names[0]].shape)
            for _, names, number in self._numbered()
            for key, value in self.state.get(number, {}).items()
            if isinstance(value, Tensor) and key.startswith(("exp_avg", "square_avg", "momentum"))
        )


@dataclass(frozen=True)
class SecondMoments(TensorFile):
    """Second moments in an optimizer.pt, which is read again whenever they are loaded."""

    names: Names = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def of(cls, saved: SavedOptimizer) -> SecondMoments:
        return cls(file_sha256(saved.path), saved.path, names=saved.names)

    def load(self) -> dict[str, Tensor]:
        assert self.path is not None
        if file_sha256(self.path) != self.sha256:
            raise RunError(f"{self.path} was altered after the run was built: build the run again")
        return SavedOptimizer(self.path, *_state_dict(self.path), self.names).second_moments()


def trainable_parameters(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """The parameters that are not frozen, in the model's order, with their names."""
    names = optimizers.names_of(model)
    return [(p, names[id(p)]) for p in model.parameters() if p.requires_grad]


def relative_rates(saved: Sequence[SavedOptimizer]) -> list[float]:
    """Every group's learning rate relative to the first group's, the one that is logged."""
    relative: list[float] | None = None
    for optimizer, key in itertools.product(saved, ("initial_lr", "lr")):
        rates = optimizer.rates(key)
        if not rates[0]:
            continue
        ratios = [rate / rates[0] for rate in rates]
        if relative is not None and not np.allclose(ratios, relative, rtol=1e-6):
            raise RunError(
                f"the ratios between the groups' learning rates change in {optimizer.path}, and "
                "only the first group's rate is logged: use RecorderCallback, or "
                "Run.from_checkpoints"
            )
        relative = ratios
    return relative or [1.0] * len(saved[0].groups)


def _state_dict(path: Path) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    try:
        mapped = zipfile.is_zipfile(path)  # memory-mapped tensors are read when they are used
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise RunError(f"{path} cannot be read without unpickling: {error}") from error
    try:
        state, groups = dict(saved["state"]), list(saved["param_groups"])
        if groups and all({"lr", "params"} <= group.keys() for group in groups):
            return state, groups
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise RunError(f"{path} does not hold the state_dict() of an optimizer")


def _candidates(groups: Sequence[Mapping[str, Any]], model: nn.Module) -> Iterator[Names]:
    """Possible names of the parameters that groups only number: the names the groups give, or all
    parameters in one group, or the Trainer's two groups, with and without weight decay."""
    parameters = trainable_parameters(model)
    if all("param_names" in group for group in groups):
        known = {name: names for _, names in parameters for name in names}
        listed = [plain_names(group["param_names"]).values() for group in groups]
        if all(name in known for group in listed for name in group):
            yield [[known[name] for name in group] for group in listed]
    if len(groups) == 1:
        yield [[names for _, names in parameters]]
    if len(groups) == 2:
        norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
        in_norm = {id(p) for norm in norms for p in norm.parameters()}
        decayed: list[list[str]] = []
        not_decayed: list[list[str]] = []
        for p, names in parameters:
            without = id(p) in in_norm or NO_DECAY_NAMES.search(names[0].lower())
            (not_decayed if without else decayed).append(names)
        yield [decayed, not_decayed]
