"""Eigendecompositions of many symmetric matrices; on a GPU, several at the same time.

One matrix of a layer keeps a GPU busy to a small part: its Householder reflections are short
products, each of which waits for the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from whence.errors import NotFinite

AT_ONCE = 8  # matrices, at most
FILLING = 8192**2  # numbers in a matrix that fills a GPU by itself
BYTES = 48  # for each number of a matrix: in float64, its copies, eigenvectors and scratch


def eigendecompositions(
    matrices: dict[str, Tensor], device: torch.device, memory: int | None = None
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(name, Λ, Q) of each matrix "<block>/...", computed in float64 on a device, largest first. A
    vector is a diagonal, without Q.

    Args:
        matrices: used up.
        memory: bytes on the device that several at a time may use.
    """
    names = sorted(matrices, key=lambda name: -matrices[name].numel())

    def decomposed(name: str) -> tuple[Tensor, Tensor | None]:
        matrix = matrices.pop(name).to(device).double()
        if not matrix.isfinite().all():
            raise NotFinite(
                f"the covariances of block {name.rpartition('/')[0]} overflow: its inputs or "
                "gradients are too large to be squared. Scale the inputs, or use "
                "dtype=torch.float64"
            )
        if matrix.dim() == 1:
            return matrix, None
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors.contiguous()

    if device.type != "cuda" or not names:
        yield from ((name, *decomposed(name)) for name in names)
        return
    here, threads = torch.cuda.current_stream(device), threading.local()
    torch.linalg.eigh(torch.eye(2, device=device, dtype=torch.float64))  # threads cannot load it

    def beside(name: str) -> tuple[Tensor, Tensor | None]:
        """The same on a stream of this thread's own."""
        if not hasattr(threads, "stream"):
            threads.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            threads.stream.wait_stream(here)
        with torch.cuda.stream(threads.stream):
            pair = decomposed(name)
        threads.stream.synchronize()
        for result in pair:
            if result is not None:
                result.record_stream(here)
        return pair

    largest = matrices[names[0]].numel()
    fitting = min(AT_ONCE, FILLING // largest)
    if memory is not None:
        fitting = min(fitting, memory // (BYTES * largest))
    with ThreadPoolExecutor(max(1, fitting)) as pool:
        yield from (
            (name, *pair) for name, pair in zip(names, pool.map(beside, names), strict=True)
        )
