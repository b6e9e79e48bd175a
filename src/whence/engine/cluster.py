"""One call on all workers of a Ray cluster, which share its work in a process group."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from whence.errors import InvalidInput, RankFailed, optional
from whence.world import World

MAX_RETRIES = 5  # for work whose worker died
START_SECONDS = 20.0  # seconds for which all workers are waited for


def connect() -> Any:
    """Ray, connected to its cluster, or to a new one on this machine."""
    with optional("executor='ray' needs Ray", "ray"):
        import ray
    if not ray.is_initialized():
        # a cluster on this machine, whose workers import from the same paths
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": paths})
    return ray


def on_ray(call: Callable[[], Any], resumes: bool) -> Any:
    """What `call` returns on the first of all free workers, one for each GPU, or for each core.

    Args:
        resumes: whether a second call resumes where a first one was lost. It is then made as soon
            as a worker dies, with the workers that are left.
    """
    if World.current().size > 1:
        raise InvalidInput(
            "executor='ray' inside a process group: call it in one process, or leave it out and "
            "let the processes of this group share the work"
        )
    ray = connect()
    for attempt in range(MAX_RETRIES + 1):
        try:
            return _attempt(ray, call)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayActorError as error:
            if not resumes or attempt == MAX_RETRIES:
                raise RankFailed(
                    f"a worker of the Ray cluster died ({' '.join(str(error).split())[:200]}): "
                    "make the same call again. With out=, it resumes"
                ) from error
    raise AssertionError


def _attempt(ray: Any, call: Callable[[], Any]) -> Any:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
    size = int(ray.cluster_resources()[kind])
    group = placement_group([{"CPU": 1.0, kind: 1.0}] * size)
    ranks: list[Any] = []
    try:
        if not group.wait(START_SECONDS):  # other work has some of them
            remove_placement_group(group)
            size = max(1, int(ray.available_resources().get(kind, 0)))
            group = placement_group([{"CPU": 1.0, kind: 1.0}] * size)
        if not group.wait(START_SECONDS):
            raise InvalidInput(
                f"the Ray cluster had no free {kind} for {2 * START_SECONDS:.0f} seconds: end "
                "other work on it, or add workers"
            )
        strategy = PlacementGroupSchedulingStrategy(group)
        options = {"num_cpus": 1, "num_gpus": int(kind == "GPU"), "scheduling_strategy": strategy}
        ranks = [ray.remote(Rank).options(**options).remote() for _ in range(size)]
        address = ray.get(ranks[0].address.remote())
        shared, folder = ray.put(call), os.getcwd()
        jobs = [
            worker.run.remote(shared, rank, size, address, kind, folder)
            for rank, worker in enumerate(ranks)
        ]
        return ray.get(_first_failure(ray, jobs) or jobs[0])
    finally:
        for worker in ranks:
            ray.kill(worker)
        remove_placement_group(group)


def _first_failure(ray: Any, jobs: list[Any]) -> Any:
    """The job whose error says most, if there is one: others fail because it did."""
    pending, lost = list(jobs), None
    while pending:
        (done,), pending = ray.wait(pending)
        try:
            ray.get(done)
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, RankFailed):
                return done
            lost = lost or done
        except ray.exceptions.RayActorError:
            return done
    return lost


class Rank:
    """A worker."""

    def address(self) -> str:
        """A free port of this machine."""
        import socket

        ray = connect()
        with socket.socket() as free:
            free.bind(("", 0))
            address = ray.util.get_node_ip_address()
            return f"{address}:{free.getsockname()[1]}"

    def run(
        self, call: Callable[[], Any], rank: int, size: int, address: str, kind: str, folder: str
    ) -> Any:
        """Make the call in a group of all workers."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if os.path.isdir(folder):  # so that relative paths mean the same
            os.chdir(folder)
        backend = "cpu:gloo,cuda:nccl" if kind == "GPU" else "gloo"
        place = f"tcp://{address}"
        dist.init_process_group(backend, init_method=place, rank=rank, world_size=size)
        try:
            result = call()
        finally:
            dist.destroy_process_group()
        return result if rank == 0 else None
