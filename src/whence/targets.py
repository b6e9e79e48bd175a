"""Targets: read as numbers, and checked. An error names the first example that has a wrong one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whence.errors import InvalidInput, InvalidTarget, InvalidType

LABEL_KEYS = ("labels", "label", "targets", "target", "y")
IGNORED = -100  # target without a loss, as in torch.nn.functional.cross_entropy


def as_tensor(labels: Any) -> Tensor:
    """Labels of a batch as a tensor."""
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        first = labels[0] if isinstance(labels, (tuple, list)) and labels else labels
        raise InvalidType(
            f"labels are {type(first).__name__} ({str(first)[:40]!r}), not numbers: give class "
            "numbers, or override targets(batch) in your Task"
        ) from error


def real(targets: Tensor) -> Tensor:
    """The targets; complex ones are refused."""
    if targets.is_complex():
        raise InvalidType(
            f"targets are {targets.dtype}: this loss is not defined for complex numbers. Give real "
            "and imaginary part as two outputs, or write a Task"
        )
    return targets


def readable(targets: Tensor) -> bool:
    """Whether reading numbers is possible (not inside torch.vmap) and does not wait for a GPU."""
    return targets.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(
        targets
    )


def check(targets: Tensor, wrong: Tensor, problem: str) -> None:
    """Raise for the first example (n, ...) that has a wrong target. `problem` says {value}.

    Where numbers cannot be read, losses are NaN instead (`unless`), and `Passes` asks again.
    """
    if readable(targets) and bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise InvalidTarget(problem.format(value=f"{targets[place].item():g}"), place[0])


def unless(wrong: Tensor | None, losses: Tensor) -> Tensor:
    """Losses (n,), NaN for examples with a wrong target."""
    if wrong is None or readable(wrong):  # then `check` has raised
        return losses
    return torch.where(wrong.reshape(len(wrong), -1).any(1), torch.nan, losses)


def class_numbers(targets: Tensor, classes: int) -> tuple[Tensor, Tensor | None]:
    """Targets of any shape as class numbers, and which of them are wrong (if that is unknown)."""
    advice = (
        f"has the target {{value}}, but the model has {classes} classes: targets must be 0 to "
        f"{classes - 1}, or {IGNORED} for no loss"
    )
    if classes == 2:
        advice += ". Give labels of -1 and 1 as 0 and 1: (y + 1) // 2"
    numbers, wrong = targets.long(), None
    if targets.is_floating_point():
        if classes > 2 / torch.finfo(targets.dtype).eps:
            raise InvalidInput(
                f"targets in {targets.dtype} cannot name {classes} classes: give them as integers"
            )
        advice += (
            ". Give a probability for every class, shape (n, classes), for soft targets, and use "
            "Regression for numbers"
        )
        wrong = numbers != targets  # also for NaN
        check(targets, wrong, advice)
    if readable(numbers):
        if numbers.numel():
            least, most = torch.aminmax(numbers)
            if int(least) < 0 or int(most) >= classes:
                check(targets, _outside(numbers, classes), advice)
        return numbers, None
    outside = _outside(numbers, classes)
    return numbers.masked_fill(outside, IGNORED), outside if wrong is None else outside | wrong


def _outside(numbers: Tensor, classes: int) -> Tensor:
    return ((numbers < 0) | (numbers >= classes)) & (numbers != IGNORED)
