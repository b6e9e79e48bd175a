"""Record one training of a recipe as a Run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import ArrayLike
from torch import nn
from torch.optim import Optimizer

from whence.persist.identity import digest
from whence.progress import progress_bar
from whence.retrain.device import cuda_devices, training_device
from whence.retrain.stage import Ints, StageRecipe, checked_seed
from whence.retrain.training import Callback
from whence.run import Recorder, Run, RunError

if TYPE_CHECKING:
    from whence.retrain.recipe import Recipe

# How the updates of a stage are made, as `StageRecipe.updates` does: given stage, model, optimizer,
# seed, examples, updates made before and callback, it yields each batch before its update.
MakeUpdates = Callable[
    [StageRecipe, nn.Module, Optimizer, int, Ints, int, Callback | None], Iterator[Ints]
]

# Called with the run's folder before a training starts. What it raises prevents the training.
before_training: ContextVar[Callable[[Path], None] | None] = ContextVar(
    "before_training", default=None
)


def record_run(
    recipe: Recipe,
    seed: int,
    out: Path,
    checkpoints: int | Sequence[int] | Mapping[str, int],
    subset: ArrayLike | None,
    *,
    stage: str | None,
    device: torch.device | str | None,
    fingerprint: str,
    every_step: bool = False,
    progress: bool = False,
    callback: Callback | None = None,
    make_updates: MakeUpdates | None = None,
) -> Run:
    """`Recipe.run` into a folder.

    Args:
        fingerprint: of the recipe, which takes a pass over the data to compute.
        make_updates: makes the updates of a stage (default: trains the model).
    """
    examples = recipe.examples(subset, stage)
    model = recipe.build(seed)
    device = training_device(device, model)
    model.to(device)
    totals = {s.name: s.total_steps(len(examples[s.name])) for s in recipe.stages}
    plan = recipe.checkpoint_plan(checkpoints)
    chosen = recipe.stage(stage).name
    origin = {
        "recipe": fingerprint,
        "seed": checked_seed(seed),
        "subset": None if subset is None else digest(examples[chosen]),
        "stage": None if subset is None else chosen,
        "checkpoints": plan if isinstance(plan, list) else list(plan.values()),
        "every_step": every_step,
    }
    finished = _finished(out, origin)
    if finished is not None:
        return finished
    ask = before_training.get()
    if ask is not None:
        ask(out)
    clips = {s.name: s.clip_norm for s in recipe.stages if s.clip_norm is not None}
    bar = progress_bar(total=sum(totals.values()), unit="update", shown=progress)
    recorder: Recorder | None = None
    start = before = 0  # updates of the whole run: recorded earlier; of the stages so far
    with ExitStack() as stack, torch.random.fork_rng(cuda_devices(device)), bar:
        for s in recipe.stages:
            optimizer, size = s.make_optimizer(model), len(examples[s.name])
            stage_plan = plan if isinstance(plan, list) else plan[s.name]
            if recorder is None:
                recorder = Recorder._of_recipe(
                    out,
                    model,
                    optimizer,
                    checkpoints=stage_plan,
                    total_steps=None if isinstance(plan, list) else totals[s.name],
                    stage=s.name,
                    size=size,
                    every_step=every_step,
                    subset=None if subset is None else examples[chosen],
                    subset_stage=None if subset is None else chosen,
                    origin=origin,
                    notes={"clip_norm": clips} if clips else None,
                )
                start = recorder.restore()
                stack.enter_context(recorder)
            else:
                more = None if isinstance(plan, list) else stage_plan
                recorder.stage(
                    s.name,
                    size=size,
                    total_steps=totals[s.name] if more else None,
                    checkpoints=more,
                    optimizer=optimizer,
                )
            skip = min(max(start - before, 0), totals[s.name])
            bar.update(skip)
            updates = make_updates or StageRecipe.updates
            for block in updates(s, model, optimizer, seed, examples[s.name], skip, callback):
                recorder.step(block)
                bar.update()
            before += totals[s.name]
    return Run.open(out)


def _finished(out: Path, origin: Mapping[str, Any]) -> Run | None:
    """The run in a folder, if it is a finished run of this very training."""
    if not (out / "run.json").exists():
        return None
    run = Run.open(out)
    if run.origin != origin:
        differing = sorted(k for k in origin if run.origin.get(k) != origin[k])
        what = f"differs in: {', '.join(differing)}" if run.origin else "was not made by a recipe"
        raise RunError(
            f"{out} holds another training than the one asked for ({what}): give another folder. "
            "If you changed nothing, the data may be random: seed it"
        )
    return run if run.finished else None
