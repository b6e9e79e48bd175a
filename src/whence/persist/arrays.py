"""Arrays in .npy files and named tensors in safetensors files, checked against checksums.

The file that describes an array (run.json, scores.json, ...) has its entry:

    {"shape": [100, 60000], "dtype": "float32", "crc32": "1f0c22aa..."}

with a CRC-32, in eight hexadecimal digits, of every MiB. Small arrays are checked when they are
opened. Large ones are mapped into memory, and each block is checked when it is first read.
"""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from whence.errors import DamagedFile, InvalidInput, MissingFile
from whence.persist.files import (
    CHECKSUM,
    REMEDY,
    atomic,
    damaged,
    naming_write_errors,
    parsing,
    refuse_special,
)
from whence.persist.identity import sha256_in_turn, sha256_of, tensors_sha256

BLOCK = 2**20  # bytes
LARGE = 2**26  # bytes; larger arrays are checked when they are read
Entry = dict[str, Any]
DTYPES = {  # as safetensors names them
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"},
}
Mode = Literal["r", "c", "r+"]


class Checksums:
    """The checksums of bytes that arrive one part after another.

    Args:
        crc32: of the bytes that came before.
        size: the number of these bytes.
    """

    def __init__(self, crc32: str = "", size: int = 0) -> None:
        self.blocks = [int(crc32[k : k + 8], 16) for k in range(0, len(crc32), 8)]
        self.size = size

    def add(self, array: NDArray[Any]) -> Checksums:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        start = 0
        while start < len(data):
            if self.size % BLOCK == 0:
                self.blocks.append(0)
            part = data[start : start + BLOCK - self.size % BLOCK]
            self.blocks[-1] = zlib.crc32(part, self.blocks[-1])
            self.size += len(part)
            start += len(part)
        return self

    @property
    def crc32(self) -> str:
        return "".join(f"{block:08x}" for block in self.blocks)


def entry_of(array: NDArray[Any]) -> Entry:
    """The entry of an array in the file that describes it."""
    about = {"shape": list(array.shape), "dtype": str(array.dtype)}
    return {**about, "crc32": Checksums().add(array).crc32}


def save_array(path: Path, array: NDArray[Any]) -> Entry:
    """Write a .npy file, row by row, and return the array's entry."""
    array = np.ascontiguousarray(_plain(array)).reshape(array.shape)  # also a single number
    with atomic(path) as temporary, open(temporary, "wb") as file:
        np.save(file, array, allow_pickle=False)
    return entry_of(array)


def load_array(
    path: Path, entry: Mapping[str, Any], *, mode: Mode = "r", remedy: str = REMEDY
) -> NDArray[Any]:
    """The array of a .npy file, mapped into memory; a large one is a `CheckedArray`.

    Args:
        entry: shape, dtype and checksums. Without checksums the array is not checked.
        mode: as for `map_array`.
        remedy: what to do if the file is missing or damaged.
    """
    array = map_array(path, mode, remedy=remedy)
    if list(array.shape) != list(entry["shape"]) or str(array.dtype) != entry["dtype"]:
        raise damaged(
            path,
            f"{array.dtype} of shape {array.shape}, but its description says {entry['dtype']} of "
            f"shape {tuple(entry['shape'])}: the files do not belong together",
            remedy,
        )
    if array.nbytes > LARGE and "crc32" in entry:
        return CheckedArray.over(array, path, str(entry["crc32"]), remedy)
    check_array(path, array, entry, remedy)
    return array


def check_array(
    path: Path, array: NDArray[Any], entry: Mapping[str, Any], remedy: str = REMEDY
) -> None:
    """Refuse an array whose content is not the one that was written."""
    if "crc32" in entry and Checksums().add(array).crc32 != entry["crc32"]:
        raise damaged(path, "altered: its checksum does not fit", remedy)


def map_array(path: Path, mode: Mode = "r", *, remedy: str = REMEDY) -> NDArray[Any]:
    """The numbers in a .npy file, mapped into memory and not checked.

    Nothing is allocated on the header's word: the file must have the size that its header implies.

    Args:
        mode: "r" for reading; "c": changes stay in memory; "r+": changes go to the file.
        remedy: what to do if the file is missing or damaged.
    """
    refuse_special(path, remedy)
    try:
        # One open file for all: another process may replace it by a new one at any time.
        with open(path, "rb+" if mode == "r+" else "rb") as file:
            shape, order, dtype = _read_header(file)
            offset, size = file.tell(), os.fstat(file.fileno()).st_size
            if size != offset + math.prod(shape) * dtype.itemsize:
                reason = f"truncated or extended: {size} bytes do not hold {dtype} of {shape}"
                raise damaged(path, reason, remedy)
            if size == offset:
                return np.zeros(shape, dtype)
            return np.memmap(file, dtype, mode, offset, shape, order)
    except FileNotFoundError as error:
        raise MissingFile(f"{path} is missing: {remedy}") from error
    except (PermissionError, DamagedFile):
        raise
    except Exception as error:  # NumPy's parser raises many types for a header that is not one
        raise damaged(path, f"truncated, or not a .npy file: {error}", remedy) from error


def create_array(path: Path, shape: tuple[int, ...], dtype: Any) -> np.memmap:
    """A .npy file of zeros, mapped into memory, to be written in parts.

    All its space is reserved now: a disk that is full while a page is written would end the
    process with a signal.
    """
    try:
        with naming_write_errors(path):
            array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
            with open(path, "rb+") as file:
                _reserve(file, path.stat().st_size)
    except IsADirectoryError as error:
        raise InvalidInput(
            f"{path} is a folder, where a file is to be written: move it away"
        ) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return array


def _reserve(file: IO[bytes], size: int) -> None:
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except AttributeError:  # not on this system
        pass
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):  # not on this disk
            raise


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    if dtype.kind not in "biuf" or any(n < 0 for n in shape):
        raise InvalidInput(f"{dtype} of shape {shape}")
    return shape, "F" if fortran else "C", dtype


class CheckedArray(np.memmap):
    """A mapped array of which each block is checked when it is first read.

    An index checks what it selects. Arithmetic, `copy`, `astype` and views check all of it. NumPy
    has no hook for `np.array`, `np.asarray`, `tolist` and `tobytes`: write `values[...]` there.
    """

    _blocks: _Blocks | None = None

    @classmethod
    def over(cls, array: NDArray[Any], path: Path, crc32: str, remedy: str) -> CheckedArray:
        checked = array.view(cls)
        checked._blocks = _Blocks(array.view(np.ndarray), path, crc32, remedy)
        return checked

    def __array_finalize__(self, obj: Any) -> None:
        super().__array_finalize__(obj)
        _plain(obj)

    def __getitem__(self, key: Any) -> Any:
        plain = self.view(np.ndarray)
        if self._blocks is not None:
            for region in _regions(plain, key if isinstance(key, tuple) else (key,)):
                self._blocks.check(region)
        return plain[key]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*map(_plain, inputs), **options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return function(*map(_plain, args), **{k: _plain(v) for k, v in kwargs.items()})


def _plain(value: Any) -> Any:
    """The value with the checked arrays in it as ordinary ones, all of whose blocks are checked."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if not hasattr(value, "_fields") else value
    if not isinstance(value, CheckedArray):
        return value
    plain = value.view(np.ndarray)
    if value._blocks is not None:
        value._blocks.check(plain)
    return plain


def _regions(plain: NDArray[Any], key: tuple[Any, ...]) -> Iterator[NDArray[Any]]:
    """Views that together hold what an index selects."""
    if all(k is None or k is ... or isinstance(k, (int, np.integer, slice)) for k in key):
        yield plain[key if ... in key else (*key, ...)]  # an ellipsis makes a view of one number
    elif isinstance(key[0], (int, np.integer, slice)):
        yield plain[key[0], ...]
    elif isinstance(key[0], (list, np.ndarray)) and np.ndim(key[0]) == 1:
        for row in np.unique(np.arange(len(plain))[key[0]]):
            yield plain[row, ...]
    else:
        yield plain


class _Blocks:
    """Which blocks of a mapped array have been checked."""

    def __init__(self, plain: NDArray[Any], path: Path, crc32: str, remedy: str) -> None:
        self.data = plain.reshape(-1).view(np.uint8)
        self.start = self.data.__array_interface__["data"][0]
        self.path, self.remedy, self.crc32 = path, remedy, crc32
        self.checked = np.zeros(-(-self.data.nbytes // BLOCK), bool)
        if len(crc32) != 8 * len(self.checked):
            raise damaged(path, "its checksums are of another array", remedy)

    def check(self, view: NDArray[Any]) -> None:
        """Check the blocks of a view of the array."""
        if view.size == 0:
            return
        if view.ndim > 1 and not view.flags.c_contiguous:
            for row in view:
                self.check(row)
            return
        first = view.__array_interface__["data"][0] - self.start
        if view.flags.c_contiguous:
            blocks = np.arange(first // BLOCK, (first + view.nbytes - 1) // BLOCK + 1)
        else:
            places = first + np.arange(len(view)) * view.strides[0]
            blocks = np.unique(places // BLOCK)  # a block holds whole numbers
        for block in blocks[~self.checked[blocks]]:
            content = self.data[block * BLOCK : (block + 1) * BLOCK]
            if f"{zlib.crc32(content.data):08x}" != self.crc32[8 * block : 8 * block + 8]:
                raise damaged(self.path, f"altered: MiB {block} has another checksum", self.remedy)
            self.checked[block] = True


# --- tensors ------------------------------------------------------------------------------------


def independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, none a view of another, as safetensors requires."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(storage.data_ptr())
        separate[name] = tensor
    return separate


def serialize(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file: the same tensors give the same bytes, whatever their order or device."""
    return safetensors.torch.save(independent(tensors))


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and their metadata, as JSON, with a checksum."""
    separate = independent(tensors)
    plain = json.loads(json.dumps(about, default=str))
    text = json.dumps({**plain, CHECKSUM: _tensors_checksum(separate, plain)})
    with atomic(path) as temporary:
        # One metadata entry, because the order of several varies.
        safetensors.torch.save_file(separate, temporary, {"about": text})


def save_in_turn(
    path: Path,
    forms: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[tuple[str, Tensor]],
    about: Mapping[str, Any],
) -> None:
    """`save_tensors` of tensors that are there one at a time.

    Args:
        forms: dtype and shape of each.
        tensors: in the order of their names.
    """
    plain, places, end = json.loads(json.dumps(about, default=str)), {}, 0
    header: dict[str, Any] = {}
    for name in sorted(forms, key=lambda name: (-forms[name][0].itemsize, name)):  # aligned
        dtype, shape = forms[name]
        places[name] = end
        end += dtype.itemsize * math.prod(shape)
        offsets = [places[name], end]
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": offsets}

    def encoded(checksum: str) -> bytes:
        text = json.dumps({**plain, CHECKSUM: checksum})
        data = json.dumps({"__metadata__": {"about": text}, **header}).encode()
        data += b" " * (-len(data) % 8)
        return len(data).to_bytes(8, "little") + data

    start = len(encoded("0" * 64))
    with atomic(path) as temporary, open(temporary, "wb") as file:

        def written() -> Iterator[str | Tensor]:
            for name, tensor in tensors:
                file.seek(start + places[name])
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                yield name
                yield tensor

        content = sha256_in_turn(written())
        shown = {name: [str(dtype), list(shape)] for name, (dtype, shape) in forms.items()}
        file.seek(0)
        file.write(encoded(_checksum(shown, plain, content)))


def _tensors_checksum(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """A digest of the tensors, with names, dtypes and shapes, and of their metadata."""
    forms = {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    return _checksum(forms, about, tensors_sha256(tensors))


def _checksum(forms: Mapping[str, Any], about: Mapping[str, Any], content: str) -> str:
    return sha256_of(json.dumps([forms, about], sort_keys=True), content)


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        opened: Any = safe_open(path, framework="pt")
        self._file = opened.__enter__()
        self._names: list[str] = list(self._file.keys())
        self.metadata: dict[str, Any] = dict(self._file.metadata() or {})

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_tensors(
    path: Path, *, remedy: str = REMEDY, checksum_required: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file, and what `save_tensors` was given about them.

    Args:
        remedy: what to do if the file is damaged.
        checksum_required: refuse a file without a checksum. Some kinds of files did not have one
            in earlier versions, and kept their metadata in separate entries.

    Raises:
        DamagedFile: the file is truncated or altered.
    """
    stored, about = open_tensors(path, remedy=remedy, checksum_required=checksum_required)
    return {name: tensor.clone() for name, tensor in stored.items()}, about


def open_tensors(
    path: Path, *, remedy: str = REMEDY, checksum_required: bool = True
) -> tuple[StoredTensors, dict[str, Any]]:
    """The same, with tensors that are checked now, and read when they are asked for."""
    with parsing(path, remedy):
        try:
            tensors = StoredTensors(path)
            about = tensors.metadata
        except SafetensorError as error:
            raise damaged(path, f"truncated, or not a safetensors file: {error}", remedy) from error
        about |= json.loads(about.pop("about", "{}"))
    # Earlier versions had a checksum of the names and bytes only, or none.
    checksum, bytes_only = about.pop(CHECKSUM, None), about.pop("sha256", None)
    if checksum is None and bytes_only is None and checksum_required:
        raise damaged(path, "it has no checksum", remedy)
    if (checksum is not None and checksum != _tensors_checksum(tensors, about)) or (
        bytes_only is not None and bytes_only != tensors_sha256(tensors)
    ):
        raise damaged(path, "altered: its checksum does not fit", remedy)
    return tensors, about
