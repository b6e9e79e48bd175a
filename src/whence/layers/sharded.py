"""Models whose weights are divided among processes by FSDP2 (`fully_shard`).

FSDP gathers a layer's weights whenever the model is called, so all processes must call it equally
often. Attribution deals examples, and its processes do not. So nothing is gathered here: every
process reads the weights of a layer from the run's checkpoint, when a pass comes to it.

    unit        the parameters that one call of `fully_shard` put together, such as a block
    forward     the matrices of a unit are there while its module runs
    backward    autograd keeps a note of a matrix instead of the matrix, and it is read again

So a process holds the matrices of the units that are running, and of the others only shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from whence.errors import InvalidInput
from whence.layers.passes import WeightLoader, Weights, load_weights
from whence.run.gather import wrapped

UNIT = "_whence_unit"  # an attribute of the modules that FSDP had wrapped


def unsharded(model: nn.Module) -> nn.Module:
    """A copy of a model that `fully_shard` divided: its plain classes, without FSDP's hooks, with
    parameters that have shapes but no values (on the meta device). Another model as it is."""
    units = [module for module in model.modules() if wrapped(module)]
    _refuse_other_shards(model, bool(units))
    if not units:
        return model
    memo: dict[int, Any] = {id(p): _shape_only(p) for p in model.parameters()}
    for module in units:
        plain = type(module).__mro__[2]  # FSDP's class for it, FSDPModule, the class itself
        memo[id(module)] = object.__new__(plain)
    for module in units:
        state = {name: value for name, value in vars(module).items() if not _of_fsdp(name)}
        hooks = {name: _other_hooks(h) for name, h in state.items() if name.endswith("_hooks")}
        vars(memo[id(module)]).update(copy.deepcopy(state | hooks, memo), **{UNIT: True})
    return copy.deepcopy(model, memo)


def _refuse_other_shards(model: nn.Module, by_fsdp: bool) -> None:
    """Refuse models that are divided in another way."""
    for name, parameter in model.named_parameters():
        placements = getattr(parameter, "placements", ())
        parts = sum("Shard" in type(placement).__name__ for placement in placements)
        if placements and (parts > 1 or not by_fsdp):
            raise InvalidInput(
                f"{name} is divided among processes by tensor parallelism: give Study the model as "
                "it is without it, or one that only torch.distributed.fsdp.fully_shard divided"
            )
        if "_flat_param" in name or "_fsdp_wrapped_module" in name:
            raise InvalidInput(
                f"{name} is of FullyShardedDataParallel (FSDP1): give Study the model inside, or "
                "divide it with torch.distributed.fsdp.fully_shard (FSDP2)"
            )


def _shape_only(parameter: nn.Parameter) -> nn.Parameter:
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(values, parameter.requires_grad)


def _of_fsdp(name: str) -> bool:
    return "_fsdp_" in name or name.startswith("__composable_api")


def _other_hooks(hooks: Mapping[int, Any]) -> Mapping[int, Any]:
    """The hooks of a module that FSDP did not register."""
    others = [(k, h) for k, h in hooks.items() if "fsdp" not in str(getattr(h, "__module__", ""))]
    return type(hooks)(others)  # type: ignore[call-arg]


# --- weights when they are needed ---------------------------------------------------------------


@dataclass(frozen=True)
class _Note:
    """What autograd keeps of a matrix, or of a view of it."""

    parameter: nn.Parameter
    weights: Mapping[str, Tensor]  # of the checkpoint
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class StreamedWeights(WeightLoader):
    """Reads the matrices of a model's units when they run; the rest is loaded as usual.

    Vectors (biases, norms) and tables of one row are small, and stay in the model.

    Args:
        model: from `unsharded`; its meta parameters become real ones, on the device.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._device, self._dtype = device, dtype
        self._matrices: dict[nn.Parameter, list[str]] = {}  # and their names
        self._nowhere: dict[nn.Parameter, Tensor] = {}
        self._weights: Mapping[str, Tensor] = {}
        self._present: dict[int, nn.Parameter] = {}  # the matrices that are there, by their memory
        self._fill()
        units = [module for module in model.modules() if UNIT in vars(module)] or [model]
        self._handles = [handle for unit in units for handle in self._attend(unit, units)]

    def load(self, checkpoint: Weights) -> None:
        if checkpoint.sha256 == self._current:
            return
        self._current, weights = None, checkpoint.opened()
        later = [name for names in self._matrices.values() for name in names]
        load_weights(self.model, weights, checkpoint.step, later)
        self._weights, self._current = weights, checkpoint.sha256

    def keep_whole(self) -> None:
        """Load all weights into the model, and leave them there."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._matrices:
            parameter.data = self._read(parameter)
        self._matrices, self._handles = {}, []

    def _fill(self) -> None:
        """Replace the meta parameters: a matrix by one number that is shown in its shape."""
        filled: dict[nn.Parameter, nn.Parameter] = {}
        for path, module in self.model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                streamed = parameter.dim() > 1 and len(parameter) > 1
                if parameter not in filled:
                    shape = () if streamed else parameter.shape
                    # a number that cannot be taken for a weight
                    number = torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)
                    values = number.expand(parameter.shape)
                    filled[parameter] = nn.Parameter(values, parameter.requires_grad)
                    self._nowhere[filled[parameter]] = values
                module._parameters[name] = filled[parameter]
                if streamed:
                    names = self._matrices.setdefault(filled[parameter], [])
                    names.append(f"{path}.{name}" if path else name)

    def _attend(self, unit: nn.Module, units: list[nn.Module]) -> Iterator[Any]:
        """Hooks that bring the unit's matrices, and take them away."""
        nested = {
            id(p)
            for other in unit.modules()
            if other is not unit and other in units
            for p in other.parameters()
        }
        matrices = [p for p in unit.parameters() if p in self._matrices and id(p) not in nested]
        packing: list[saved_tensors_hooks] = []

        def bring(*_: Any) -> None:
            for parameter in matrices:
                parameter.data = self._read(parameter)
                self._present[_memory(parameter)] = parameter
            packing.append(saved_tensors_hooks(self._pack, self._unpack))
            packing[-1].__enter__()

        def take_away(*_: Any) -> None:
            packing.pop().__exit__(None, None, None)
            if packing:  # it called itself
                return
            for parameter in matrices:
                self._present.pop(_memory(parameter), None)
                parameter.data = self._nowhere[parameter]

        yield unit.register_forward_pre_hook(bring, prepend=True)
        yield unit.register_forward_hook(take_away, always_call=True)

    def _read(self, parameter: nn.Parameter, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        weights = self._weights if weights is None else weights
        name = next(name for name in self._matrices[parameter] if name in weights)
        return weights[name].to(self._device, self._dtype)

    def _pack(self, tensor: Tensor) -> Tensor | _Note:
        parameter = self._present.get(_memory(tensor))
        if parameter is None:
            return tensor
        return _Note(
            parameter, self._weights, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def _unpack(self, saved: Tensor | _Note) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        whole = self._read(saved.parameter, saved.weights)
        return whole.as_strided(saved.size, saved.stride, saved.offset)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
