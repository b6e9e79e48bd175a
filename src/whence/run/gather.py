"""Whole weights of a model that FSDP2 (`fully_shard`) divides among processes.

Rank 0 writes the run, and it alone knows when. So it leads: it announces the tensors that it needs,
and the other ranks, which wait in the same hook of the optimizer, assist until it is done. Tensors
are gathered one at a time. On the other ranks a whole tensor is there only for that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from whence.errors import RankFailed
from whence.world import World

DONE, FAILED = "done", "failed"
#: named tensors of which some are announced
Sources = Mapping[str, Callable[[], Mapping[str, Tensor] | None]]


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a part of a tensor."""
    return type(tensor).__name__ == "DTensor" or type(tensor.data).__name__ == "DTensor"


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def part_of(whole: Tensor, like: Any) -> Tensor:
    """A whole tensor, divided among the processes as another one is. Nothing is sent."""
    if not is_sharded(like) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(like.to_local().device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def wrapped(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this module."""
    return any(parent.__name__ == "FSDPModule" for parent in type(module).__mro__)


def divided(model: nn.Module) -> bool:
    """Whether a model's parameters are sharded, also while FSDP has gathered some of them."""
    return any(map(wrapped, model.modules())) or any(map(is_sharded, model.parameters()))


def gathered(source: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the CPU in place of sharded ones, at rank 0, where the others assist.

    Args:
        source: where the other ranks find tensors of these names.
    """
    names = [name for name, tensor in tensors.items() if is_sharded(tensor)]
    if not names:
        return dict(tensors)
    World.current().of_first([source, names])
    whole = {name: _whole(tensors[name]) for name in names}
    return {name: whole.get(name, tensor) for name, tensor in tensors.items()}


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.detach().full_tensor().cpu()
    return whole


@contextmanager
def leading(others_assist: bool) -> Iterator[None]:
    """Around what rank 0 does while the other ranks assist."""
    if not others_assist:
        yield
        return
    try:
        yield
    except RankFailed:
        raise
    except BaseException as error:
        with suppress(RankFailed):
            World.current().of_first([FAILED, str(error)])
        raise
    World.current().of_first([DONE, None])


def assist(sources: Sources) -> None:
    """Give rank 0 what it announces, until it is done."""
    while True:
        source, about = World.current().of_first(None)
        if source == DONE:
            return
        if source == FAILED:
            raise RankFailed(f"rank 0 could not record the run: {about}")
        tensors = sources[source]() or {}
        for name in about:
            tensors[name].detach().full_tensor()  # type: ignore[attr-defined]
