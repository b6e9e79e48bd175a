"""Recording a model that FSDP2 (`fully_shard`) divides among processes.

Rank 0 writes the run, and it alone knows when. So it leads: it announces the tensors that it needs,
and the other ranks, which wait in the same hook of the optimizer, assist until it is done. Tensors
are gathered one at a time. On the other ranks a whole tensor is there only for that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from torch import Tensor, nn

from whence.errors import RankFailed
from whence.world import World, is_sharded

DONE, FAILED = "done", "failed"
#: named tensors of which some are announced
Sources = Mapping[str, Callable[[], Mapping[str, Tensor] | None]]


def wrapped(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this module."""
    return any(parent.__name__ == "FSDPModule" for parent in type(module).__mro__)


def divided(model: nn.Module) -> bool:
    """Whether a model's parameters are sharded, also while FSDP has gathered some of them."""
    return any(map(wrapped, model.modules())) or any(map(is_sharded, model.parameters()))


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
