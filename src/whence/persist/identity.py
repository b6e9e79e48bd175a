"""Identities: SHA-256 digests of content, and the keys of caches made of them.

The values are on disk, in run folders, caches and results. They must never change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BUILT_IN = (bool, int, float, complex, str, bytes)
PLAIN = (*BUILT_IN, np.generic)  # repr shows all of their content
CONTAINERS = (dict, list, tuple, set, frozenset)

NAMED = (torch.dtype, torch.device)


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
    return sha256_of(json.dumps(settings, sort_keys=True, default=_as_text))[:32]


def _as_text(value: Any) -> str:
    """What JSON cannot hold: by its text if that is all of it, or else by its content."""
    return str(value) if isinstance(value, (Path, *PLAIN, *NAMED)) else digest(value)


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The digest of named tensors: names and bytes, in the order of the names."""
    return sha256_of(*(part for name in sorted(tensors) for part in (name, tensors[name])))


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """The digest of a batch or of a setting, by content; dtypes and shapes count.

    An object is digested field by field, a function by its code and by the values it captures. Of
    an object that is also a tensor, a number, a text or a container, both parts count.
    Whatever has no readable content (a lock, an open file) counts by its type only.
    """
    return _digest(value, {})


def _digest(value: Any, known: dict[int, tuple[Any, str]]) -> str:
    """Args:
    known: digests of the objects so far, by id; of one that contains itself, its number.
    """
    fields = _fields(value)
    if isinstance(value, Tensor) and not _in_parts(value) and not fields:
        return sha256_of(f"{value.dtype}{tuple(value.shape)}", value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return sha256_of(f"{value.dtype}{value.shape}", value)
    if value is None or (
        isinstance(value, PLAIN) and not isinstance(value, np.void) and not fields
    ):
        return sha256_of(repr(value), *_plain_reprs(value))
    if id(value) not in known:
        known[id(value)] = value, f"object {len(known)}"  # holds the value, so its id stays its own
        known[id(value)] = value, _digest_parts(value, known)
    return known[id(value)][1]


def _fields(value: Any) -> dict[str, Any] | None:
    """The attributes that an object of a subclass has besides its content as a built-in type."""
    if isinstance(value, Tensor):
        return None if _in_parts(value) else value.__dict__
    return getattr(value, "__dict__", None) if isinstance(value, BUILT_IN + CONTAINERS) else None


def _plain_reprs(value: Any) -> list[str]:
    """What the built-in type says of an object whose class may have a repr of its own."""
    if type(value) in BUILT_IN or not isinstance(value, BUILT_IN) or isinstance(value, np.generic):
        return []
    return [kind.__repr__(value) for kind in BUILT_IN if isinstance(value, kind)]


def _digest_parts(value: Any, known: dict[int, tuple[Any, str]]) -> str:
    fields = _fields(value)
    if fields:
        return sha256_of(_digest_content(value, known), _digest(fields, known))
    return _digest_content(value, known)


def _digest_content(value: Any, known: dict[int, tuple[Any, str]]) -> str:
    if isinstance(value, Mapping):
        try:
            keys = sorted(value)
        except TypeError:  # keys of several types
            keys = sorted(value, key=repr)
        return sha256_of(*(f"{key}={_digest(value[key], known)}" for key in keys))
    if isinstance(value, (set, frozenset)):
        return sha256_of("set", *sorted(_digest(item, known) for item in value))
    parts = value if isinstance(value, (tuple, list)) else _parts(value)
    return sha256_of(*(_digest(part, known) for part in parts))


def _in_parts(tensor: Tensor) -> bool:
    """Whether a tensor consists of others: sparse, nested, quantized."""
    return tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized


def _parts(value: Any) -> list[Any]:
    """What an object consists of, in values that are simpler."""
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if isinstance(value, Tensor) and not _in_parts(value):
        return [value.as_subclass(Tensor).detach()]
    if isinstance(value, Tensor) and value.is_quantized:
        return [str(value.dtype), value.dequantize()]
    if isinstance(value, BUILT_IN):
        return [repr(value), *_plain_reprs(value)]
    if isinstance(value, np.void):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, np.ndarray):  # of objects: its bytes are memory addresses
        return [value.shape, value.ravel().tolist()]
    if isinstance(value, (type, ModuleType, BuiltinFunctionType)):
        return [name, getattr(value, "__name__", "")]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        return [value.__code__, value.__defaults__, value.__kwdefaults__, captured(value)]
    if isinstance(value, CodeType):
        return [value.co_code, value.co_consts, value.co_names, value.co_varnames]
    owner = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # it cannot be copied, so its fields are all there is to read
        return [owner, getattr(value, "__dict__", None)]
    if isinstance(reduced, str):  # the name of a global object
        return [owner, reduced]
    make, arguments, *state = reduced
    items = [list(part) if isinstance(part, Iterator) else part for part in state]
    return [owner, getattr(make, "__qualname__", ""), arguments, *items]


def captured(function: FunctionType) -> list[Any]:
    """The values of a function's closure."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            values.append(None)
    return values


def _bytes(tensor: Tensor) -> memoryview | bytes:
    if tensor.is_meta or not tensor.numel():
        return b""
    flat = tensor.detach().cpu().resolve_conj().contiguous()
    # A row cut out of a strided table counts as contiguous, but its stride is not 1.
    row = flat.as_strided((flat.numel(),), (1,))
    return row.view(torch.uint8).numpy().data
