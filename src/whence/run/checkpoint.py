"""Weights on disk (safetensors, checked by SHA-256) or in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from whence.errors import DamagedFile, InvalidInput, WhenceError
from whence.persist import identity
from whence.persist.arrays import load_tensors, serialize
from whence.persist.files import as_path, damaged, refuse_special, write_bytes
from whence.persist.identity import sha256_of
from whence.world import gathered, local

REMEDY = "restore it from a copy, or record the run again"


class RunError(WhenceError, RuntimeError):
    """A run on disk that is missing, damaged, or not the one that was meant."""


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without what DistributedDataParallel (`module.`) and torch.compile (`_orig_mod.`)
    put before it. `module.` is removed only if every name has it: a layer may have this name."""
    plain = {name: name.replace("_orig_mod.", "") for name in names}
    while plain and all(name.startswith("module.") for name in plain.values()):
        plain = {name: short.removeprefix("module.") for name, short in plain.items()}
    return plain


def refuse_lazy(tensors: Mapping[str, Tensor]) -> None:
    """Refuse those that get their shapes in the first call of a layer."""
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if lazy:
        raise InvalidInput(
            f"{lazy[0]} has no values yet, because it belongs to a lazy layer: call the model with "
            "a batch first"
        )


def untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split named tensors into those to keep and other names of the same memory ({alias: name})."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        address = local(tensor).data_ptr()
        place = (tensor.device, address, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and seen.setdefault(place, name) != name:
            aliases[name] = seen[place]
        else:
            unique[name] = tensor
    return unique, aliases


def model_weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A model's parameters and buffers under their plain names, tied ones once, and the aliases.
    Whole ones: if they are sharded, the other ranks assist (see `whence.run.gather`)."""
    unique, aliases = untie(plain_state(model))
    return gathered("weights", unique), aliases


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers under their plain names."""
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    plain = plain_names(state)
    return {plain[name]: tensor for name, tensor in state.items()}


def weights_sha256(model: nn.Module) -> str:
    """The SHA-256 of the file that a checkpoint of the model, as it is now, would be."""
    return sha256_of(serialize(model_weights(model)[0]))


def architecture_sha256(model: nn.Module) -> str:
    """SHA-256 of its modules' names and kinds, and of what the first outputs hardly tell: rates of
    dropout, momenta of batch norms. (Its repr would change with torch's versions.)"""
    modules = []
    for name, module in model.named_modules():
        settings = {k: getattr(module, k, None) for k in ("p", "momentum")}
        numbers = {k: v for k, v in settings.items() if isinstance(v, (int, float))}
        modules.append([name, type(module).__qualname__, numbers])
    return sha256_of(json.dumps(modules))


def parameters_sha256(model: nn.Module) -> str:
    """SHA-256 of its parameters alone, without buffers."""
    return sha256_of(serialize(gathered("parameters", untie(dict(model.named_parameters()))[0])))


@dataclass(frozen=True)
class TensorFile:
    """Named tensors, on disk or in memory, with the SHA-256 of their file.

    A file may leave out tensors that are the same in another one, its `base`: frozen weights are
    stored once. Then `sha256` is that of the file with all of them, and `stored` its own.
    """

    sha256: str
    path: Path | None = None
    aliases: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    memory: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)
    base: TensorFile | None = field(default=None, compare=False, repr=False)
    unchanged: Sequence[str] = field(default=(), compare=False, repr=False)  # only in the base
    stored: str = field(default="", compare=False, repr=False)

    @classmethod
    def write(
        cls,
        path: Path,
        tensors: Mapping[str, Tensor],
        aliases: Mapping[str, str] | None = None,
        base: TensorFile | None = None,
        unchanged: Sequence[str] = (),
    ) -> TensorFile:
        """
        Args:
            base: has the same tensors under the names `unchanged`.
        """
        data = serialize(tensors)
        whole = cls(sha256_of(data), path, aliases or {})
        if unchanged:
            data = serialize({k: x for k, x in tensors.items() if k not in set(unchanged)})
            stored = sha256_of(data)
            whole = replace(whole, base=base, unchanged=sorted(unchanged), stored=stored)
        write_bytes(path, data)
        return whole

    @classmethod
    def adopt(cls, source: Mapping[str, Tensor] | str | os.PathLike[str]) -> TensorFile:
        """Somebody's state dict (copied, so that training on does not change it) or file."""
        if not isinstance(source, Mapping):
            path = as_path(source)
            return cls(file_sha256(path), path)
        strangers = {k: type(v).__name__ for k, v in source.items() if not isinstance(v, Tensor)}
        if strangers:
            raise InvalidInput(
                f"a state dict holds {strangers}, which are not tensors: "
                "pass the model's own state dict"
            )
        refuse_lazy(source)
        plain = plain_names(source)
        unique, aliases = untie({plain[name]: tensor for name, tensor in source.items()})
        memory = {
            name: t.to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, t in unique.items()
        }
        return cls(sha256_of(serialize(memory)), None, aliases, memory)

    def load(self) -> dict[str, Tensor]:
        """The tensors, on the CPU, under all their names."""
        if self.memory is not None:
            tensors = dict(self.memory)
        else:
            tensors = read_tensors(self._verified())
            if self.unchanged:
                base = self._base()
                tensors |= {name: base[name] for name in self.unchanged}
        for alias, name in self.aliases.items():
            if name in tensors:
                tensors[alias] = tensors[name]
        return tensors

    def open(self) -> Mapping[str, Tensor]:
        """The same tensors; those of a safetensors file are read on access."""
        if self.path is None or self.path.suffix != ".safetensors":
            return self.load()
        return OpenedTensors(self._verified(), self.aliases, self._base())

    def _verified(self) -> Path:
        assert self.path is not None
        actual, recorded = file_sha256(self.path), self.stored or self.sha256
        if actual != recorded:
            reason = (
                f"truncated or altered: its SHA-256 is {actual[:12]}…, "
                f"{recorded[:12]}… was recorded"
            )
            raise RunError(str(damaged(self.path, reason, REMEDY)))
        return self.path

    def _base(self) -> Mapping[str, Tensor]:
        """What has the tensors that this file leaves out."""
        if not self.unchanged:
            return {}
        base = {} if self.base is None else self.base.open()
        missing = [name for name in self.unchanged if name not in base]
        if missing:
            raise RunError(
                f"{self.path} leaves {missing[0]} to the run's first checkpoint, which does not "
                f"have it: {REMEDY}"
            )
        return base


class OpenedTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, which is mapped into memory. Do not write to them.

    Args:
        aliases: other names of tensors.
        base: has those that the file leaves out.
    """

    def __init__(self, path: Path, aliases: Mapping[str, str], base: Mapping[str, Tensor]) -> None:
        try:
            self._file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise RunError(str(damaged(path, error, REMEDY))) from error
        plain = plain_names(self._file.keys())  # type: ignore[no-untyped-call]
        self._names = {short: name for name, short in plain.items()}
        self._aliases, self._base = aliases, base

    def __getitem__(self, name: str) -> Tensor:
        name = self._aliases.get(name, name)
        if name not in self._names:
            return self._base[name]
        tensor: Tensor = self._file.get_tensor(self._names[name])  # type: ignore[no-untyped-call]
        return tensor

    def __contains__(self, name: object) -> bool:
        plain = self._aliases.get(str(name), name)
        return plain in self._names or plain in self._base

    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys([*self._names, *self._base])
        return iter(names | {a: None for a, name in self._aliases.items() if name in names})

    def __len__(self) -> int:
        return sum(1 for _ in self)


def file_sha256(path: Path) -> str:
    try:
        refuse_special(path, REMEDY)
        return identity.file_sha256(path)
    except DamagedFile as error:
        raise RunError(str(error)) from error
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing: {REMEDY}") from error
    except PermissionError:
        raise
    except OSError as error:  # such as a folder of this name
        raise RunError(str(damaged(path, error, REMEDY))) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors file, or of a state dict written by torch.save; never unpickled."""
    try:
        if path.suffix == ".safetensors":
            loaded = load_tensors(path, remedy=REMEDY, checksum_required=False)[0]
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except DamagedFile as error:
        raise RunError(str(error)) from error
    except Exception as error:
        raise RunError(str(damaged(path, error, REMEDY))) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(t, Tensor) for t in loaded.values()):
        content = sorted(map(str, loaded)) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise RunError(
            f"{path} holds {content}, not a state dict: save model.state_dict() by itself"
        )
    plain = plain_names(loaded)
    return {plain[name]: tensor.detach() for name, tensor in loaded.items()}


@dataclass(frozen=True)
class Checkpoint:
    """The model after `step` updates."""

    step: int
    stage: str
    files: TensorFile = field(repr=False)
    moments: TensorFile | None = field(default=None, repr=False)
    state: TensorFile | None = field(default=None, repr=False)

    @property
    def sha256(self) -> str:
        """SHA-256 of the weights' file (of the file they would make, for weights in memory)."""
        return self.files.sha256

    @property
    def path(self) -> Path | None:
        return self.files.path

    def weights(self) -> dict[str, Tensor]:
        """The whole state dict, buffers and tied names included, on the CPU. Verified first."""
        return self.files.load()

    def opened(self) -> Mapping[str, Tensor]:
        """The same; each tensor is read when it is asked for."""
        return self.files.open()

    def second_moments(self) -> dict[str, Tensor] | None:
        """{parameter: v̂}, bias-corrected for Adam; None for an optimizer that keeps none."""
        if self.moments is None:
            return None
        moments = self.moments.load()
        tied = {a: moments[name] for a, name in self.files.aliases.items() if name in moments}
        return tied | moments

    def optimizer_state(self) -> dict[str, Tensor] | None:
        """The optimizer's own tensors, as {"parameter/key": tensor}; None when none were kept."""
        return self.state.load() if self.state else None


def same_weights(model: nn.Module, checkpoint: Checkpoint) -> bool:
    """Whether a model has a checkpoint's weights, to the bit."""
    actual, wanted = model_weights(model)[0], untie(checkpoint.weights())[0]
    return actual.keys() == wanted.keys() and all(
        x.dtype == wanted[name].dtype and torch.equal(x.cpu(), wanted[name])
        for name, x in actual.items()
    )
