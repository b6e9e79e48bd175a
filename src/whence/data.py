"""Batches of a map-style dataset, always the same examples in the same order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from whence.errors import InvalidInput, InvalidType, examples_of, warn
from whence.persist.identity import digest, sha256_of
from whence.task import Classification, Task

Collate = Callable[[list[Any]], Any]
Labels = NDArray[np.int64]
READ_AT_ONCE = 1024  # examples whose labels are read
HASH_BATCH = 256  # examples per digest
MOST_EXAMPLES = 10**12  # of a dataset; indices of all are in memory
READ_TWICE = 8192  # examples that are compared with a second read, of a larger dataset


class Batches:
    """A dataset cut into batches of consecutive (or chosen) examples, on a device and in a dtype.

    Args:
        name: of the dataset, for error messages ("train", "query").
        dataset: map-style: `len(dataset)` and `dataset[index]`.
        collate: turns a list of examples into a batch (default: torch's).
    """

    def __init__(self, name: str, dataset: Any, collate: Collate | None = None) -> None:
        indexable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not indexable or isinstance(dataset, IterableDataset):
            raise InvalidType(
                f"{name} is a {type(dataset).__name__}: it must be a map-style dataset, "
                "with len(dataset) and dataset[index] (a TensorDataset, a list of examples, ...)"
            )
        try:
            count = len(dataset)
        except Exception as error:  # of the user's code
            raise InvalidInput(
                f"len({name}) failed: {type(error).__name__}: {error}. It must be the number of "
                "examples"
            ) from error
        if count == 0:
            raise InvalidInput(f"{name} is empty: it must hold at least one example")
        if count > MOST_EXAMPLES:
            raise InvalidInput(
                f"len({name}) is {count:,}: a dataset may have {MOST_EXAMPLES:,} examples. "
                "Give those that were trained on"
            )
        self.name, self.dataset, self.collate = name, dataset, collate
        self._fingerprint: str | None = None
        self._moving = ""
        self._read: tuple[np.ndarray, str] | None = None  # some of the examples, and their digest

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: Sequence[int] | np.ndarray) -> Any:
        """The batch of these examples, on the dataset's own device and in its own dtype."""
        if self.sliceable:
            order = np.asarray(indices, dtype=np.int64)
            where: Any = torch.from_numpy(order)
            if len(order) and (np.diff(order) == 1).all():
                where = slice(int(order[0]), int(order[-1]) + 1)
            # a copy, because a model may change its input in place
            return tuple(tensor[where].clone() for tensor in self.dataset.tensors)
        with examples_of(self.name, indices, "the dataset or its collate function"):
            rows = [self.dataset[int(k)] for k in indices]
            if any(isinstance(row, Contrast) for row in rows):
                raise InvalidType(
                    f"{self.name} has a Contrast among its examples: a Contrast is all queries. "
                    "Give it alone, as attribute(study, Contrast(a, b)), with lists for a and b"
                )
            batch = self._collated(rows) if self.collate is None else self.collate(rows)
            for tensor in tensors_in(batch):
                if not _plain(tensor):
                    raise InvalidType(
                        f"{self.name} batches have a tensor that is {_kind(tensor)}: give "
                        "Study(collate=...) that makes it dense"
                    )
        return batch

    def _collated(self, rows: list[Any]) -> Any:
        fields = rows[0].items() if isinstance(rows[0], Mapping) else ()
        lists = [name for name, value in fields if isinstance(value, list)]
        if lists:
            raise InvalidType(
                f"{self.name} examples hold lists ({', '.join(lists)}), which torch cannot "
                "collate: give Study(collate=...), such as transformers.default_data_collator or, "
                "with padding, transformers.DataCollatorWithPadding(tokenizer)"
            )
        try:
            return default_collate(rows)
        except (TypeError, RuntimeError) as error:
            if "equal size" in str(error):
                raise InvalidInput(
                    f"{self.name} examples have different sizes, which torch cannot collate: give "
                    "Study(collate=...), such as whence.padded for documents of tokens"
                ) from error
            raise InvalidType(
                f"torch cannot collate {self.name} examples ({error}): give Study(collate=...) "
                "that makes tensors of them"
            ) from error

    @property
    def sliceable(self) -> bool:
        """Whether many examples are read as fast as one, and batched without a collate function."""
        return (
            type(self.dataset) is TensorDataset
            and self.collate is None
            and all(map(_plain, self.dataset.tensors))
        )

    def stream(
        self,
        blocks: Sequence[np.ndarray],
        device: torch.device,
        dtype: torch.dtype,
        workers: int = 0,
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """(indices, batch) for each block of indices, in order."""
        if workers == 0 or self.sliceable:
            for block in blocks:
                yield block, place(self.take(block), device, dtype)
            return
        loader = DataLoader(
            self.dataset,
            batch_sampler=[block.tolist() for block in blocks],
            collate_fn=self.collate,
            num_workers=workers,
            generator=torch.Generator(),  # leaves the global generator unchanged
        )
        for block, batch in zip(blocks, loader, strict=True):
            yield block, place(batch, device, dtype)

    def refresh(self) -> None:
        """Discard the cached fingerprint, because the data may have changed."""
        self._fingerprint = self._read = None

    def fingerprint(self) -> str:
        """SHA-256 of every example; warns if examples differ between two reads.

        A Hugging Face dataset's own fingerprint is trusted, unless a transform computes its
        examples.
        """
        if self._fingerprint is None:
            self._moving = ""
            self._fingerprint = self._recorded_fingerprint() or self._read_fingerprint()
            if self._moving:
                warn(self._moving)
        return self._fingerprint

    def check_unchanged(self) -> None:
        """Warn if some examples are no longer those that the fingerprint was taken of."""
        if self._read is None or self._moving:
            return
        block, before = self._read
        if self._digests([block]) != [before]:
            self._moving = (
                f"{self.name}[{block[0]}] to [{block[-1]}] are not what they were when they were "
                "first read: the data changes with time, or with the number of reads. Scores are a "
                "mixture; give the dataset in a fixed state"
            )
            warn(self._moving)

    @property
    def moving(self) -> str:
        """The warning if examples differ between two reads; else nothing."""
        self.fingerprint()
        return self._moving

    def _recorded_fingerprint(self) -> str | None:
        """That of a `datasets.Dataset` itself: a subclass or a wrapper may change its examples."""
        trusted = getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", None)
        if (
            type(self.dataset) is not trusted
            or self.collate is not None
            or self.dataset.format["type"] == "custom"
        ):
            return None
        return str(self.dataset._fingerprint)

    def _read_fingerprint(self) -> str:
        blocks = cut(len(self), HASH_BATCH)
        if self.collate is None and type(self.dataset) in (TensorDataset, list, tuple):
            return sha256_of(str(len(self)), *self._digests(blocks))
        sample, first = blocks, None
        if len(self) > READ_TWICE:  # scattered, so that it has examples of every kind
            order = np.random.default_rng(0).permutation(len(self))[:READ_TWICE]
            sample = [order[block] for block in cut(READ_TWICE, HASH_BATCH)]
            first = self._digests(sample)
        digests = self._digests(blocks)
        self._read = blocks[-1], digests[-1]
        len(self)  # between two passes, as a loader asks for it: some datasets then shuffle
        second = self._digests(sample)
        for block, before, after in zip(sample, first or digests, second, strict=True):
            if before != after:
                self._moving = self._describe_moving(block)
                break
        return sha256_of(str(len(self)), *digests)

    def _digests(self, blocks: list[np.ndarray]) -> list[str]:
        return [digest(self.take(block)) for block in blocks]

    def _describe_moving(self, block: np.ndarray) -> str:
        """The warning about a block of examples of which some differ between two reads."""
        singles = ([block[k : k + 1]] for k in range(len(block)))
        place = next((str(k[0][0]) for k in singles if self._digests(k) != self._digests(k)), "...")
        return (
            f"{self.name}[{place}] differs between two reads: the data is random (augmented?) or "
            "changes its order. Scores then depend on the draw; give the dataset without "
            "augmentation, in a fixed order"
        )


class Contrast:
    """Why one example rather than another: queries that are differences of two measurements.

    Query k is the measurement of `a[k]` minus that of `b[k]`. Of a language model, these are two
    completions of the same prompt, each with labels of -100 on the prompt (`whence.completion`).
    Completions may differ in length: each has the measurement that the task gives it alone, a mean
    or a sum over its tokens.

    Args:
        a: map-style dataset with the same fields as the training data.
        b: likewise, with as many examples.
    """

    def __init__(self, a: Any, b: Any) -> None:
        if isinstance(a, Mapping) or isinstance(b, Mapping):
            raise InvalidType(
                "Contrast takes two datasets: for one example each, write Contrast([a], [b])"
            )
        sides = [Batches("Contrast(a=...)", a), Batches("Contrast(b=...)", b)]
        if len(sides[0]) != len(sides[1]):
            raise InvalidInput(
                f"Contrast of {len(sides[0])} and {len(sides[1])} examples: give one b for every a"
            )
        self.a, self.b = a, b

    def __len__(self) -> int:
        return len(self.a)

    @property
    def examples(self) -> Any:
        """All of a, then all of b. They are read when they are asked for, so that examples that
        differ between two reads are noticed."""
        return ConcatDataset([self.a, self.b])


def place(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The batch with its tensors on the device and its floating tensors in the dtype."""
    if isinstance(batch, Tensor):
        if batch.is_complex():
            return batch.to(device, torch.complex128 if dtype == torch.float64 else torch.complex64)
        return batch.to(device, dtype if batch.is_floating_point() else None)
    if isinstance(batch, Mapping):
        return {key: place(value, device, dtype) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        placed = [place(value, device, dtype) for value in batch]
        return type(batch)(*placed) if hasattr(batch, "_fields") else tuple(placed)
    return batch


def batch_length(batch: Any) -> int:
    """The number of examples in a batch: the length of its first tensor."""
    first = next(tensors_in(batch), None)
    if first is None or first.dim() == 0:
        raise InvalidType(
            "a batch has no tensor with an entry for each example, so its length is not known: "
            "give Study(collate=...) that makes such tensors of the examples"
        )
    return len(first)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Collection) and not isinstance(batch, (str, bytes)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(value)


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is an array of numbers: not sparse, nested, quantized, or without data."""
    strided = tensor.layout == torch.strided
    return strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _kind(tensor: Tensor) -> str:
    kinds = {
        "nested": tensor.is_nested,
        "quantized": tensor.is_quantized,
        "on the meta device": tensor.is_meta,
    }
    return next((name for name, true in kinds.items() if true), "sparse")


def structure(batch: Any) -> Any:
    """The fields of a batch, independent of its size, to compare training and query batches."""
    if isinstance(batch, Tensor):
        kind = "complex" if batch.is_complex() else "integer"
        return "float" if batch.is_floating_point() else kind
    if isinstance(batch, Mapping):
        return {str(key): structure(value) for key, value in sorted(batch.items())}
    if isinstance(batch, (tuple, list)):
        return [structure(value) for value in batch]
    return type(batch).__name__


def cut(count: int, size: int) -> list[np.ndarray]:
    """0 .. count-1 in consecutive blocks of `size` (the last may be shorter)."""
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


def classes(task: Task, data: Batches) -> Labels | None:
    """The class of every example, (n,); None for a task that is no classification."""
    if not isinstance(task, Classification):
        return None
    blocks = cut(len(data), READ_AT_ONCE)
    return np.concatenate([task.labels(data.take(block)).cpu().numpy() for block in blocks])
