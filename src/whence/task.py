"""What training minimised and what we measure.

For a batch, a `Task` defines the model's outputs, each example's training loss, each example's
measurement, and the pseudo-losses whose gradients have the Gauss-Newton matrix as their covariance.
Subclass it, or one of the ready-made tasks, and override what differs. Here are those with one
prediction for an example; `language.py` has those of language models, `sets.py` those of several
rows.

Shapes: `n` examples, `t` positions, `c` classes or outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whence.draws import Uniform as Uniform
from whence.errors import InvalidInput, InvalidTarget, InvalidType, MissingKey, check_choice
from whence.persist.identity import call_text, defaults_of

LABEL_KEYS = ("labels", "label", "targets", "target", "y")
IGNORED = -100  # target without a loss, as in torch.nn.functional.cross_entropy
SUM_TOLERANCE = 1e-2  # of a target's probabilities, which may be rounded to bfloat16
BLOCK = 256  # classes that a GPU sums together before it draws one
EXACT_LIMIT = 4096  # outputs per example above which an output Hessian is refused


Draws = Callable[[int], Tensor] | Tensor


def draw(uniform: Draws, like: Tensor) -> Tensor:
    """Uniforms in the shape of `like` (n, ...), from a `Uniform` or from a tensor given by hand."""
    if isinstance(uniform, Tensor):
        return uniform.to(like.device).reshape(like.shape)
    count = like[0].numel() if len(like) else 1
    return uniform(count).to(like.device).reshape(like.shape)


class Task:
    """Base class. A subclass defines `losses` and `measurements`; the rest has sensible defaults.

    Attributes:
        measurement: name of what `measurements` returns.
        unit: the unit scores are in.
        higher_is_better: direction of the measurement (a margin: True; a loss: False).
    """

    measurement: str = "measurement"
    unit: str = "units of the measurement"
    higher_is_better: bool = True

    def __init_subclass__(cls, **settings: Any) -> None:
        """Reset `pseudo_losses` and `output_factor` in a subclass that defines only `losses`.

        Its parent's belong to another loss. The defaults of `Task` work for any loss.
        """
        super().__init_subclass__(**settings)
        if "losses" in vars(cls):
            for name in ("pseudo_losses", "output_factor"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(Task, name))

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        """The model's outputs for a batch, (n, ...).

        From a tuple, the model receives every element but the last (a single element is passed
        too). From a mapping, it receives everything but the labels, by name. If the result has
        `.logits`, these are the outputs.
        """
        if isinstance(batch, Mapping):
            result = model(**{k: v for k, v in batch.items() if k not in LABEL_KEYS})
        elif isinstance(batch, (tuple, list)):
            result = model(*(batch[:-1] if len(batch) > 1 else batch))
        else:
            result = model(batch)
        result = getattr(result, "logits", result)
        if not isinstance(result, Tensor):
            raise InvalidType(
                f"the model returned {type(result).__name__}, not a tensor: "
                "override outputs(model, batch) in your Task to pick the tensor"
            )
        return result

    def targets(self, batch: Any) -> Tensor:
        """The labels in a batch: the last element of a tuple, or the entry named like a label."""
        if isinstance(batch, Mapping):
            label_keys = [k for k in LABEL_KEYS if k in batch]
            if not label_keys:
                raise MissingKey(
                    f"no labels in the batch (it has {sorted(batch)}): name them one of "
                    f"{LABEL_KEYS}, or override targets(batch) in your Task"
                )
            return as_tensor(batch[label_keys[0]])
        if isinstance(batch, (tuple, list)) and len(batch) > 1:
            return as_tensor(batch[-1])
        raise InvalidType(
            f"cannot find labels in a batch of type {type(batch).__name__}: use (inputs, labels) "
            "tuples or mappings, or override targets(batch) in your Task"
        )

    def ignored(self, batch: Any) -> Tensor | None:
        """The examples whose targets say that they have no loss, (n,); None if no target can."""
        return None

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        """Each example's training loss, (n,). Training minimised their mean."""
        raise InvalidType(f"{type(self).__name__} must define losses(outputs, batch)")

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        """Each example's measurement, (n,)."""
        raise InvalidType(f"{type(self).__name__} must define measurements(outputs, batch)")

    def mask(self, batch: Any) -> Tensor | None:
        """Positions that exist, (n, t); None when all do. Default: the batch's `attention_mask`."""
        if isinstance(batch, Mapping) and isinstance(batch.get("attention_mask"), Tensor):
            mask: Tensor = batch["attention_mask"]
            return mask if mask.dim() == 2 else None
        return None

    def rows(self, batch: Any) -> int:
        """How many rows of the model's batch an example has, one after another. Default: 1."""
        return 1

    def representations(self, model: nn.Module, batch: Any) -> Tensor | None:
        """The vectors that `RepSim` compares: (n, r), or (n, t, r) to average over positions.

        The default, None, selects the input of the last tracked linear layer.
        """
        return None

    def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Draws) -> Tensor:
        """Losses (n,) at randomly drawn pseudo-targets, for the sampled Fisher.

        Their gradient in the outputs must have mean zero and covariance equal to the Hessian of
        `losses` in the outputs. This default draws Gaussian directions with exactly that covariance
        and works for any loss that is convex in a moderate number of outputs.
        """
        factor = self.output_factor(outputs, batch)
        normal = torch.special.ndtri(draw(uniform, factor[:, 0])).to(factor.dtype)
        directions = torch.einsum("nck,nk->nc", factor, normal)
        losses: Tensor = (outputs.reshape(len(outputs), -1) * directions).sum(1)
        return losses

    def output_factor(self, outputs: Tensor, batch: Any) -> Tensor:
        """B (n, c, k) with B Bᵀ the Hessian of each example's loss in its own outputs."""
        point = outputs.detach().requires_grad_()
        count = point[0].numel()
        if count > EXACT_LIMIT:
            raise InvalidInput(
                f"the Hessian of the loss in {count} outputs per example is too large to form: "
                "use fisher='sampled' or 'empirical' (with a custom Task, define pseudo_losses)"
            )
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(
                self.losses(point, batch).sum(), point, create_graph=True
            )
            if not slope.requires_grad:  # a loss that is linear in the outputs has no curvature
                return point.new_zeros(len(point), count, 1)
            rows = [
                torch.autograd.grad(column.sum(), point, retain_graph=True)[0]
                for column in slope.reshape(len(point), -1).unbind(1)
            ]
        hessian = torch.stack([row.reshape(len(point), -1) for row in rows], 1).double()
        values, vectors = torch.linalg.eigh((hessian + hessian.mT) / 2)
        factor: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
        return factor.to(outputs.dtype)

    def __repr__(self) -> str:
        given = {"unit": self.unit, "higher_is_better": self.higher_is_better}  # by measurement
        return self.called(defaults_of(type(self)) | given)

    def called(self, defaults: Mapping[str, Any]) -> str:
        """The task with its settings that differ from `defaults`: "Classification()"."""
        given = {name: value for name, value in sorted(vars(self).items()) if name[0] != "_"}
        return call_text(type(self).__name__, given, defaults)


def sample(logits: Tensor, uniform: Draws) -> Tensor:
    """One class per row by inverting the distribution function: (..., c) and (...) -> (...)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    draws = draw(uniform, logits[..., 0]).unsqueeze(-1).to(wide)
    if logits.device.type != "cpu" and logits.shape[-1] > 2 * BLOCK:
        return inverted_in_blocks(logits.detach().softmax(-1), draws).squeeze(-1)
    cumulative = logits.detach().softmax(-1, dtype=wide).cumsum_(-1)
    levels = draws * cumulative[..., -1:]
    return torch.searchsorted(cumulative, levels).squeeze(-1).clamp_(max=cumulative.shape[-1] - 1)


def inverted_in_blocks(probabilities: Tensor, draws: Tensor) -> Tensor:
    """The same by blocks of classes, then inside one: (..., c) and (..., 1) -> (..., 1).

    A GPU takes many times as long for the cumulative sums of long rows as for their sums. Sums are
    in the precision of the draws.
    """
    rows, classes = probabilities.shape[:-1], probabilities.shape[-1]
    whole = classes // BLOCK * BLOCK
    blocks, rest = probabilities[..., :whole].view(*rows, -1, BLOCK), probabilities[..., whole:]
    add_up = partial(torch.sum, dim=-1, dtype=draws.dtype)
    sums = torch.cat([add_up(blocks), add_up(rest, keepdim=True)], -1)
    cumulative = F.pad(sums.cumsum(-1), (1, 0))  # before each block, and in all
    levels = draws * cumulative[..., -1:]
    block = (torch.searchsorted(cumulative, levels) - 1).clamp_(0, sums.shape[-1] - 1)
    places = block * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = probabilities.gather(-1, places.clamp_max(classes - 1)).to(draws.dtype)
    inside = inside.masked_fill_(places >= classes, 0).cumsum_(-1)
    levels = torch.minimum(levels - cumulative.gather(-1, block), inside[..., -1:])
    return (block * BLOCK + torch.searchsorted(inside, levels)).clamp_(max=classes - 1)


class Classification(Task):
    """Softmax cross-entropy over two or more logits; with one logit, binary cross-entropy.

    Targets are class numbers (n,), or a probability for every class (n, c): one-hot or soft. With
    one logit, a target is the probability of class 1. Examples with the target -100 have no loss,
    no curvature and no measurement (it is 0); they count in the mean over examples. For several
    labels per example, use `MultiLabel`.

    Args:
        measurement: "margin" (correct logit minus the log-sum-exp of the others; for soft targets,
            of the most probable class), "loss" or "log_prob".
    """

    def __init__(self, measurement: str = "margin") -> None:
        self.measurement = check_choice("measurement", measurement, ("margin", "loss", "log_prob"))
        self.higher_is_better = measurement != "loss"
        self.unit = {"margin": "logits", "loss": "nats", "log_prob": "nats"}[measurement]

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs as (n, c); a single logit z is binary, with the logits (0, z)."""
        outputs = outputs.unsqueeze(-1) if outputs.dim() == 1 else outputs
        if outputs.dim() != 2:
            raise InvalidInput(
                f"Classification needs outputs of shape (n, classes), got {tuple(outputs.shape)}: "
                "override outputs(model, batch), or use LanguageModeling for one label per position"
            )
        return F.pad(outputs, (1, 0)) if outputs.shape[1] == 1 else outputs

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        logits = self.logits(outputs)
        targets, wrong = self._checked(logits, outputs, batch)
        return unless(wrong, F.cross_entropy(logits, targets, reduction="none"))

    def labels(self, batch: Any) -> Tensor:
        """Targets as class numbers, (n,): of soft targets, the most probable class."""
        targets = self.targets(batch)
        if targets.dim() == 2 and targets.shape[1] > 1:
            return targets.argmax(1)
        targets = targets.flatten()
        probable = (targets > 0) & (targets < 1)  # the probability of class 1, with one logit
        return torch.where(probable, (targets >= 0.5).to(targets.dtype), targets).long()

    def correct(self, outputs: Tensor, batch: Any) -> Tensor:
        """1 where the most probable class is the target's, else 0, (n,)."""
        return (self.logits(outputs).argmax(1) == self.labels(batch)).to(outputs.dtype)

    def _checked(self, logits: Tensor, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Class numbers (n,) or probabilities (n, c); and which are wrong, if that is unknown."""
        targets, (n, classes) = self._given(batch), logits.shape
        several = targets.dim() == 2 and targets.shape[1] > 1
        if targets.shape[:1] != (n,) or (targets.shape[1:].numel() != 1 and not several):
            raise InvalidInput(
                f"targets of shape {tuple(targets.shape)} for outputs of shape "
                f"{tuple(outputs.shape)}: Classification needs class numbers ({n},), or a "
                f"probability for every class ({n}, {classes}). Override targets(batch)"
            )
        if several:
            if targets.shape[1] != classes or outputs[0].numel() == 1:
                raise InvalidInput(
                    f"targets of shape {tuple(targets.shape)} do not fit outputs of shape "
                    f"{tuple(outputs.shape)}: give class numbers ({n},), or use MultiLabel, which "
                    "has one output per label"
                )
            return self._probabilities(targets, logits.dtype)
        targets = targets.flatten()
        if outputs[:1].numel() > 1 or not targets.is_floating_point():
            return class_numbers(targets, classes)
        ignored = targets == IGNORED
        wrong = ~((targets >= 0) & (targets <= 1) | ignored)
        advice = (
            "has the target {value}, but the model has one logit: a target must be 0, 1, or the "
            f"probability of class 1 ({IGNORED} for no loss). Give labels of -1 and 1 as 0 and 1: "
            "(y + 1) / 2"
        )
        check(targets, wrong, advice)
        both = torch.stack([1 - targets, targets], 1).to(logits.dtype)
        return both.masked_fill(ignored.unsqueeze(1), 0.0), wrong

    @staticmethod
    def _probabilities(targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        negative = ~((targets >= 0) & (targets <= 1))
        check(
            targets,
            negative,
            "has the probability {value} in its target: probabilities must be between 0 and 1",
        )
        targets = targets.to(dtype)
        sums = targets.sum(1)
        unequal = ~((sums - 1).abs() <= SUM_TOLERANCE)
        check(
            sums,
            unequal,
            "has a target whose probabilities sum to {value}, not 1: use MultiLabel if an example "
            "has several labels, or normalise them",
        )
        return targets, unequal | negative.any(1)

    def ignored(self, batch: Any) -> Tensor:
        """The examples that have no loss, (n,)."""
        targets = self._given(batch)
        return targets.reshape(len(targets), -1)[:, 0] == IGNORED

    def _given(self, batch: Any) -> Tensor:
        """What a subclass defines: `labels` if it has its own, else `targets`."""
        overridden = type(self).labels is not Classification.labels
        return real(self.labels(batch) if overridden else self.targets(batch))

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        if self.measurement != "margin":
            losses = self.losses(outputs, batch)
            return losses if self.measurement == "loss" else -losses
        logits = self.logits(outputs)
        targets, wrong = self._checked(logits, outputs, batch)
        labels = targets if targets.dim() == 1 else targets.argmax(1)
        correct = labels.clamp_min(0).unsqueeze(1)
        others = logits.scatter(1, correct, float("-inf"))
        margins = logits.gather(1, correct).squeeze(1) - others.logsumexp(1)
        return unless(wrong, margins.masked_fill(self.ignored(batch), 0.0))

    def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Draws) -> Tensor:
        logits = self.logits(outputs)
        self._checked(logits, outputs, batch)
        drawn = sample(logits, uniform).masked_fill(self.ignored(batch), IGNORED)
        return F.cross_entropy(logits, drawn, reduction="none")

    def output_factor(self, outputs: Tensor, batch: Any) -> Tensor:
        self._checked(self.logits(outputs), outputs, batch)
        if outputs.dim() == 1 or outputs.shape[1] == 1:
            p = outputs.detach().reshape(-1, 1, 1).sigmoid()
            factor = (p * (1 - p)).sqrt()
        else:
            # diag(p) - ppᵀ = BBᵀ with B = diag(√p) - p√pᵀ. Since B√p = 0, a reflection that takes
            # √p to the last axis leaves c - 1 columns.
            p = self.logits(outputs).detach().softmax(1)
            root = p.sqrt()
            square = root.diag_embed() - p.unsqueeze(2) * root.unsqueeze(1)
            share = root[:, :-1] / (1 + root[:, -1:])
            factor = square[..., :-1] - square[..., -1:] * share.unsqueeze(1)
        return factor.masked_fill(self.ignored(batch).reshape(-1, 1, 1), 0.0)


class MultiLabel(Task):
    """Binary cross-entropy of every label of an example, as `nn.BCEWithLogitsLoss`.

    Outputs and targets have the same shape, (n, labels). A target is 0, 1, or the probability of
    1; -100 for a label that is not known, which has no loss and is left out of the mean.

    Args:
        reduction: "mean" or "sum" over an example's labels, as in *training*. The default of
            `nn.BCEWithLogitsLoss` is the mean over examples and labels.
        measurement: "margin" (each label's logit, with the sign of the right answer), "loss" or
            "log_prob", reduced over labels in the same way.
    """

    def __init__(self, reduction: str = "mean", measurement: str = "margin") -> None:
        self.reduction = check_choice("reduction", reduction, ("mean", "sum"))
        self.measurement = check_choice("measurement", measurement, ("margin", "loss", "log_prob"))
        self.higher_is_better = measurement != "loss"
        self.unit = {"margin": "logits", "loss": "nats", "log_prob": "nats"}[measurement]

    def _checked(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, targets and which targets are known, (n, labels); which are wrong."""
        targets = real(self.targets(batch))
        if targets.shape != outputs.shape:
            raise InvalidInput(
                f"targets of shape {tuple(targets.shape)} do not fit outputs of shape "
                f"{tuple(outputs.shape)}: MultiLabel needs 0 or 1 for every label and example. Use "
                "Classification for one class per example"
            )
        targets = targets.reshape(len(outputs), -1)
        known = targets != IGNORED
        wrong = ~((targets >= 0) & (targets <= 1)) & known
        check(
            targets,
            wrong,
            "has the target {value}: a label must be 0, 1, or the probability of 1 "
            f"({IGNORED} if it is not known). Give labels of -1 and 1 as 0 and 1",
        )
        logits = outputs.reshape(len(outputs), -1)
        return logits, targets.to(outputs.dtype), known, wrong

    def ignored(self, batch: Any) -> Tensor | None:
        """The examples of which no label is known, (n,)."""
        if type(self).losses is not MultiLabel.losses:
            return None
        targets = self.targets(batch)
        return (targets.reshape(len(targets), -1) == IGNORED).all(1)

    def _over_labels(
        self, values: Tensor, known: Tensor, normaliser: Callable[[Tensor], Tensor]
    ) -> Tensor:
        sums = values.masked_fill(~known, 0.0).sum(1)
        if self.reduction == "sum":
            return sums
        return sums / normaliser(known.sum(1).clamp_min(1).to(sums.dtype))

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        logits, targets, known, wrong = self._checked(outputs, batch)
        by_label = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return unless(wrong, self._over_labels(by_label, known, lambda count: count))

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        if self.measurement != "margin":
            losses = self.losses(outputs, batch)
            return losses if self.measurement == "loss" else -losses
        logits, targets, known, wrong = self._checked(outputs, batch)
        margins = torch.where(targets >= 0.5, logits, -logits)
        return unless(wrong, self._over_labels(margins, known, lambda count: count))

    def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Draws) -> Tensor:
        logits, _, known, _ = self._checked(outputs, batch)
        drawn = (draw(uniform, logits) < logits.detach().sigmoid()).to(logits.dtype)
        by_label = F.binary_cross_entropy_with_logits(logits, drawn, reduction="none")
        # independent draws add their variances, as over the tokens of a document
        return self._over_labels(by_label, known, torch.sqrt)

    def output_factor(self, outputs: Tensor, batch: Any) -> Tensor:
        logits, _, known, _ = self._checked(outputs, batch)
        p = logits.detach().sigmoid()
        roots = (p * (1 - p)).sqrt().masked_fill(~known, 0.0)
        if self.reduction == "mean":
            roots = roots / known.sum(1, keepdim=True).clamp_min(1).to(roots.dtype).sqrt()
        return roots.diag_embed()


class Regression(Task):
    """Squared error, averaged over the outputs of an example as `nn.MSELoss` does.

    Args:
        loss: "mse" is (f - y)², "half_mse" is (f - y)² / 2.
        measurement: "absolute_error", "loss" or "output" (the mean output itself).
    """

    def __init__(self, loss: str = "mse", measurement: str = "absolute_error") -> None:
        self.loss = check_choice("loss", loss, ("mse", "half_mse"))
        options = ("absolute_error", "loss", "output")
        self.measurement = check_choice("measurement", measurement, options)
        self.higher_is_better = measurement == "output"
        self.unit = "squared target units" if measurement == "loss" else "target units"

    def residuals(self, outputs: Tensor, batch: Any) -> Tensor:
        """f - y, (n, outputs)."""
        targets = real(self.targets(batch))
        if targets.numel() != outputs.numel() or targets.shape[:1] != outputs.shape[:1]:
            raise InvalidInput(
                f"targets of shape {tuple(targets.shape)} do not fit outputs of shape "
                f"{tuple(outputs.shape)}: override targets(batch) or outputs(model, batch)"
            )
        return (outputs - targets.reshape(outputs.shape).to(outputs.dtype)).reshape(
            len(outputs), -1
        )

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return self._squared(self.residuals(outputs, batch)).mean(1)

    def _squared(self, residuals: Tensor) -> Tensor:
        return residuals.square() if self.loss == "mse" else residuals.square() / 2

    def measurements(self, outputs: Tensor, batch: Any) -> Tensor:
        if self.measurement == "output":
            return outputs.reshape(len(outputs), -1).mean(1)
        if self.measurement == "loss":
            return self.losses(outputs, batch)
        return self.residuals(outputs, batch).abs().mean(1)

    def pseudo_losses(self, outputs: Tensor, batch: Any, uniform: Draws) -> Tensor:
        outputs = outputs.reshape(len(outputs), -1)
        deviation = 0.5**0.5 if self.loss == "mse" else 1.0
        noise = torch.special.ndtri(draw(uniform, outputs)).to(outputs.dtype) * deviation
        squared = self._squared(outputs - (outputs.detach() + noise)).sum(1)
        return squared / math.sqrt(outputs.shape[1])


# --- targets, read as numbers and checked ---------------------------------------------------------
# An error names the first example that has a wrong target.


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
