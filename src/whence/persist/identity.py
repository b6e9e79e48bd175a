"""Identities: SHA-256 digests of content, and the keys of caches made of them.

The values are on disk, in run folders, caches and results. They must never change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sha256_of(*parts: str | bytes | NDArray[Any] | Tensor) -> str:
    """The digest of all parts, one after another: text as UTF-8, arrays and tensors by their bytes.

    Neither lengths, shapes nor dtypes count; see `digest`.
    """
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            sha.update(_bytes(part))
        elif isinstance(part, np.ndarray):
            sha.update(part.tobytes())
        else:
            sha.update(part.encode() if isinstance(part, str) else part)
    return sha.hexdigest()


def key_of(settings: Mapping[str, Any]) -> str:
    """A name for settings: the first half of the digest of their canonical JSON."""
    return sha256_of(json.dumps(settings, sort_keys=True, default=str))[:32]


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The digest of named tensors: names and bytes, in the order of the names."""
    return sha256_of(*(part for name in sorted(tensors) for part in (name, tensors[name])))


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """The digest of a batch, or of anything it may consist of; dtypes and shapes count."""
    if isinstance(value, Tensor):
        return sha256_of(f"{value.dtype}{tuple(value.shape)}", value)
    if isinstance(value, np.ndarray):
        return sha256_of(f"{value.dtype}{value.shape}", value)
    if isinstance(value, Mapping):
        return sha256_of(*(f"{key}={digest(value[key])}" for key in sorted(value)))
    if isinstance(value, (tuple, list)):
        return sha256_of(*map(digest, value))
    return sha256_of(repr(value))


def _bytes(tensor: Tensor) -> memoryview | bytes:
    flat = tensor.detach().cpu().contiguous()
    if not flat.numel():
        return b""
    # A row cut out of a strided table counts as contiguous, but its stride is not 1.
    row = flat.as_strided((flat.numel(),), (1,))
    return row.view(torch.uint8).numpy().data
