"""Digests of what classes and functions do: their code, and the values that it refers to.

A digest changes with the code itself, not with comments or formatting, and it may change with
Python's version. Code of installed packages counts by name and version.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from whence.persist.identity import captured, digest, sha256_of

OURS = "whence"
INSTRUCTIONS = (
    *("LOAD_GLOBAL", "STORE_GLOBAL", "IMPORT_NAME"),
    *("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"),
)
OF_EVERY_CLASS = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__")


def class_sha256(*classes: type) -> str:
    """The digest of what these classes, and the classes of them, define and inherit."""
    parents = {p for each in classes for p in (*each.__mro__, *type(each).__mro__)} - {type}
    return _sha256(sorted(parents, key=lambda c: (c.__module__, c.__qualname__)), set())


def setting_sha256(value: Any) -> str:
    """The digest of a value, and of the code that it brings along: a function with what that refers
    to, or an object with its class."""
    return _sha256(value, set())


def model_sha256(model: nn.Module) -> str:
    """The digest of the code of a model's modules, also of methods replaced in one of them."""
    modules = list(model.modules())
    replaced = [
        [name, value]
        for module in modules
        for name, value in sorted(vars(module).items())
        if isinstance(value, (FunctionType, MethodType, functools.partial))
    ]
    return sha256_of(class_sha256(*{type(m) for m in modules}), _sha256(replaced, set()))


def _sha256(value: Any, seen: set[int]) -> str:
    """Args:
    seen: ids of the functions and classes that are in the digest already.
    """
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    if isinstance(value, functools.partial):
        value = [value.func, *value.args, *value.keywords.items()]
    if isinstance(value, property):
        value = [value.fget, value.fset]
    if isinstance(value, (list, tuple)):
        return sha256_of(*(_sha256(item, seen) for item in value))
    if not isinstance(value, (type, FunctionType)):
        code = [type(value)] if _version(type(value).__module__) is None else []
        return digest(value) if not code else sha256_of(digest(value), _sha256(code, seen))
    name = f"{value.__module__}.{value.__qualname__}"
    version = _version(value.__module__)
    if id(value) in seen or version is not None:
        return sha256_of(name, version or "")
    seen.add(id(value))
    return sha256_of(name, *(_sha256(part, seen) for part in _contents(value)))


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
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if not installed & set(Path(file).resolve().parents):
        return None
    return str(getattr(sys.modules[root], "__version__", ""))
