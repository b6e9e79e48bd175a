"""Identities: SHA-256 digests of content and of code, keys of caches, and calls as text.

Digests of content are on disk, in run folders, caches and results. They must never change.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

BUILT_IN = (bool, int, float, complex, str, bytes)
PLAIN = (*BUILT_IN, np.generic)  # repr shows all of their content
CONTAINERS = (dict, list, tuple, set, frozenset)
NAMED = (torch.dtype, torch.device)

OURS = "whence"
OF_OTHERS = ("torch", "numpy")  # never the user's code, even if installed from source
INSTALLED = ("site-packages", "dist-packages")  # names of folders
INSTRUCTIONS = (
    *("LOAD_GLOBAL", "STORE_GLOBAL", "IMPORT_NAME"),
    *("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"),
)
STATE = ("_parameters", "_buffers", "_modules", "training")  # of a module, which is no code
OF_EVERY_CLASS = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__")


Part = str | bytes | NDArray[Any] | Tensor


def sha256_of(*parts: Part) -> str:
    """The digest of all parts, one after another: text as UTF-8, arrays and tensors by their bytes.

    Neither lengths, shapes nor dtypes count; see `digest`.
    """
    return sha256_in_turn(parts)


def sha256_in_turn(parts: Iterable[Part]) -> str:
    """The same of parts that are there one at a time."""
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
    return sha256_in_turn(part for name in sorted(tensors) for part in (name, tensors[name]))


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
        content = _digest_content(value, known)
        content = sha256_of(content, _digest(fields, known)) if fields else content
        known[id(value)] = value, content
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


def _digest_content(value: Any, known: dict[int, tuple[Any, str]]) -> str:
    if isinstance(value, Mapping):
        try:
            keys = sorted(value)
        except TypeError:  # keys of several types
            keys = sorted(value, key=repr)
        names = [key if type(key) is str else _digest(key, known) for key in keys]
        pairs = zip(names, keys, strict=True)
        return sha256_of(*(f"{name}={_digest(value[key], known)}" for name, key in pairs))
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


# --- code ---------------------------------------------------------------------------------------
# What classes and functions do: their code, and the values that it refers to. Comments and
# formatting do not count; Python's version may. Code of installed packages counts by name and
# version.


def class_sha256(*classes: type) -> str:
    """The digest of what these classes, and the classes of them, define and inherit."""
    kinds = [kind for each in classes for kind in (each, type(each))]
    parents = {parent for kind in kinds for parent in kind.__mro__} - {type}
    return setting_sha256(sorted(parents, key=lambda c: (c.__module__, c.__qualname__)))


def model_sha256(model: nn.Module) -> str:
    """The digest of the code of a model's modules, also of methods replaced in one of them."""
    modules = list(model.modules())
    module_ids = {id(module) for module in modules}
    replaced = [
        [name, value]
        for module in modules
        for name, value in sorted(vars(module).items())
        if isinstance(value, (FunctionType, MethodType, functools.partial))
    ]
    # Hooks, and functions inside lists, dicts and objects that modules hold. What a hook captures
    # is no setting, but what it keeps of the forward passes.
    visited, others = set(module_ids), []
    for module in modules:
        for name, value in sorted(vars(module).items()):
            code = [] if name in STATE else _code_inside(value, visited)
            if name.endswith("_hooks"):
                code = [getattr(function, "__code__", function) for function in code]
            others += [[name, function] for function in code]
    return sha256_of(
        class_sha256(*{type(m) for m in modules}),
        setting_sha256(replaced, set(module_ids)),
        *([setting_sha256(others, set(module_ids))] if others else []),
    )


def setting_sha256(value: Any, seen: set[int] | None = None) -> str:
    """The digest of a value, and of the code that it brings along: a function with what that refers
    to, or an object with its class.

    Args:
        seen: ids of the functions and classes that are in the digest already.
    """
    seen = set() if seen is None else seen
    if isinstance(value, MethodType):
        value = [value.__func__, *([] if id(value.__self__) in seen else [value.__self__])]
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, functools.partial):
        value = [value.func, *value.args, *value.keywords.items()]
    if isinstance(value, property):
        value = [value.fget, value.fset]
    if isinstance(value, (list, tuple)):
        return sha256_of(*(setting_sha256(item, seen) for item in value))
    if not isinstance(value, (type, FunctionType)):
        code = [type(value)] if _version(type(value).__module__) is None else []
        code = _code_inside(value, set()) or code
        return digest(value) if not code else sha256_of(digest(value), setting_sha256(code, seen))
    name = f"{value.__module__}.{value.__qualname__}"
    version = _version(value.__module__)
    if id(value) in seen or version is not None:
        return sha256_of(name, version or "")
    seen.add(id(value))
    return sha256_of(name, *(setting_sha256(part, seen) for part in _contents(value)))


def _code_inside(value: Any, visited: set[int]) -> list[Any]:
    """The functions and bound methods that a value holds, in containers and in attributes of
    objects; and the classes of these objects. The code of installed packages is left out.

    Args:
        visited: ids of the values that are not looked into.
    """
    if isinstance(value, (type, ModuleType, CodeType, Tensor, np.ndarray, *PLAIN)):
        return []
    if value is None or id(value) in visited:
        return []
    visited.add(id(value))
    if isinstance(value, FunctionType):
        return [value] if _version(value.__module__) is None else []
    if isinstance(value, MethodType):
        return [value.__func__, *_code_inside(value.__self__, visited)]
    if isinstance(value, functools.partial):
        parts: list[Any] = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    elif isinstance(value, (set, frozenset)):
        parts = sorted(value, key=lambda part: str(getattr(part, "__qualname__", "")))
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    inside = [code for part in parts for code in _code_inside(part, visited)]
    if _version(type(value).__module__) is None:
        inside.append(type(value))
    return inside


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, type):
        for name, member in sorted(vars(value).items()):
            if name not in OF_EVERY_CLASS and not _private(name, member):
                yield [name, member]
        return
    yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
    yield from captured(value)
    names = _names(value.__code__)
    used, written = (names[op] for op in ("LOAD_GLOBAL", "STORE_GLOBAL"))
    modules = [sys.modules.get(name) for name in sorted(names["IMPORT_NAME"])]
    modules += [part for part in captured(value) if isinstance(part, ModuleType)]
    for name in sorted((used - written) & value.__globals__.keys()):
        member = value.__globals__[name]
        if isinstance(member, ModuleType):
            modules.append(member)
        else:
            yield [name, member]
    attributes = names["LOAD_ATTR"] | names["LOAD_METHOD"] | names["IMPORT_FROM"]
    for module in modules:  # of installed packages, the names are in the code
        if module is not None and _version(module.__name__) is None:
            for name in sorted(attributes & vars(module).keys()):
                yield [name, vars(module)[name]]


def _private(name: str, member: Any) -> bool:
    """Whether Python itself keeps this in a class, and not its author."""
    return (name.startswith("__") and not callable(member)) or name.startswith("_abc_")


@functools.lru_cache(4096)
def _names(code: CodeType) -> Mapping[str, frozenset[str]]:
    """The names that each of these instructions has, in code and in the functions inside it."""
    names: dict[str, set[str]] = {name: set() for name in INSTRUCTIONS}
    for instruction in dis.get_instructions(code):
        if instruction.opname in names:
            names[instruction.opname].add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for name, inside in _names(constant).items():
                names[name] |= inside
    return {name: frozenset(texts) for name, texts in names.items()}


@functools.cache
def _version(module: str) -> str | None:
    """The version of an installed package; None for the code of a program or a notebook."""
    root = module.partition(".")[0]
    if root == OURS or root in sys.builtin_module_names or root in sys.stdlib_module_names:
        return ""
    file = getattr(sys.modules.get(root), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    folder = path.parents[1] if path.stem == "__init__" else path.parent
    if root not in OF_OTHERS and folder.name not in INSTALLED and not _came_with(root, folder):
        return None
    return str(getattr(sys.modules[root], "__version__", ""))


def _came_with(root: str, folder: Path) -> bool:
    """Whether a package was installed into this folder (pip --target). One that is installed as
    editable lies elsewhere: it is code that its user changes."""
    names = metadata.packages_distributions().get(root, ())
    return any(
        Path(str(metadata.distribution(n).locate_file(""))).resolve() == folder for n in names
    )


def call_text(name: str, given: Mapping[str, object], defaults: Mapping[str, object]) -> str:
    """'Source(segments=3)': a call with the arguments that differ from their defaults."""
    parts = [f"{k}={v!r}" for k, v in given.items() if k not in defaults or v != defaults[k]]
    return f"{name}({', '.join(parts)})"


def defaults_of(call: Callable[..., object]) -> dict[str, object]:
    """The defaults of a function's or constructor's arguments, by name."""
    parameters = inspect.signature(call).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
