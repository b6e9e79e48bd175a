"""Compare a recipe with what a run recorded: is it the same training?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whence.data import place
from whence.retrain.recipe import Recipe
from whence.retrain.stack import IMPLEMENTATION_FLAGS
from whence.retrain.stacked import running_statistics
from whence.retrain.stage import StageRecipe
from whence.run import Run, Stage, optimizers
from whence.run.checkpoint import Checkpoint
from whence.study import Study, loader
from whence.table import listed
from whence.task import Task

COMPARED = 64  # examples whose losses are compared
WHERE = (torch.device("cpu"), torch.float32)


def differences(recipe: Recipe, run: Run) -> list[str]:
    """What differs between the training of a recipe and the recorded one; one sentence each.

    Compares updates, batch sizes, the optimizer and its settings, and the learning rate and
    momentum of every parameter at every update.
    """
    if len(recipe.stages) != len(run.stages):
        names = [stage.name for stage in run.stages]
        return [f"the run has the stages {names}, the recipe {[s.name for s in recipe.stages]}"]
    model, unequal = recipe.build(0), []
    for of_recipe, of_run in zip(recipe.stages, run.stages, strict=True):
        where = f"stage {of_run.name!r}: " if len(run.stages) > 1 else ""
        unequal += [where + difference for difference in _of_stage(of_recipe, of_run, run, model)]
    return unequal


def unknown(recipe: Recipe, run: Run) -> list[str]:
    """What the recipe does and the run does not show; one sentence each."""
    sentences = []
    if run.batches is None:
        sentences.append(
            "the run does not show the size of its batches: record them with "
            "recorder.step(indices) to compare them with the recipe's"
        )
    if any(stage.clip_norm is not None for stage in recipe.stages) and "clip_norm" not in run.notes:
        sentences.append(
            "the recipe clips gradients, and the run does not say whether its training did: record "
            "it with Recorder(notes={'clip_norm': ...})"
        )
    if any(stage.transform is not None for stage in recipe.stages):
        sentences.append(
            "the recipe transforms examples, and a run does not show whether its training did"
        )
    return sentences


def other_initial_weights(recipe: Recipe, run: Run, seed: int) -> str | None:
    """The name of a tensor that is not the run's initial one; None if all are.

    Running statistics do not count: the first forward pass changes them before they are saved.
    """
    assert run.initial is not None
    model = recipe.build(seed)
    statistics = running_statistics(model, nn.modules.batchnorm._NormBase)
    built, initial = model.state_dict(), run.initial.weights()
    for name in sorted({*initial, *built} - statistics.keys()):
        if name not in initial or name not in built:
            return name
        ours = built[name].cpu()
        if ours.shape != initial[name].shape or not torch.equal(ours, initial[name].to(ours.dtype)):
            return name
    return None


def other_losses(recipe: Recipe, study: Study, run: Run) -> list[str]:
    """Whether model and task of the recipe have other losses than the study's, on some examples at
    the run's final weights; one sentence for each stage."""
    sentences: list[str] = []
    if len(recipe.stages) != len(study.stages):
        return sentences
    for stage, name in zip(recipe.stages, study.stages, strict=True):
        weights = [c for c in run.checkpoints if c.stage == name]
        if not weights:
            continue
        data = study.data[name]
        rows = np.linspace(0, len(data) - 1, min(COMPARED, len(data))).round().astype(np.int64)
        batch = place(data.take(np.unique(rows)), *WHERE)
        ours = _losses(study.models[name], study.tasks[name], weights[-1], batch)
        theirs = _losses(recipe.build(0), stage.task, weights[-1], batch)
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True):
            k = int((ours - theirs).abs().argmax())
            where = f"stage {name!r}: " if len(study.stages) > 1 else ""
            sentences.append(
                f"{where}the loss of example {int(np.unique(rows)[k])} is {float(ours[k]):.4g} "
                f"in the study and {float(theirs[k]):.4g} in the recipe, at the same weights"
            )
    return sentences


def _losses(model: nn.Module, task: Task, weights: Checkpoint, batch: Any) -> Tensor:
    """The losses of a copy of the model with these weights, (n,)."""
    loaded = loader(model, *WHERE)
    loaded.load(weights)
    with torch.no_grad():
        return task.losses(task.outputs(loaded.model, batch), batch).double()


def _of_stage(stage: StageRecipe, recorded: Stage, run: Run, model: nn.Module) -> Iterator[str]:
    examples = len(stage.data)
    if run.subset is not None and recorded.name == (run.subset_stage or run.stages[0].name):
        examples = len(run.subset)
    if recorded.size not in (None, examples):
        yield f"the run used {recorded.size} examples, the recipe uses {examples}"
    updates, planned = recorded.end - recorded.start, stage.total_steps(examples)
    if updates != planned and (run.finished or updates > planned or recorded is not run.stages[-1]):
        advice = ""
        if replace(stage, drop_last=not stage.drop_last).total_steps(examples) == updates:
            advice = f" (with drop_last={not stage.drop_last} as many)"
        yield f"the run made {updates} updates, the recipe makes {planned}{advice}"
    optimizer = stage.make_optimizer(model)
    kind = optimizers.kind(optimizer)
    if kind != run.optimizers[recorded.name]:
        yield f"the run's optimizer is {run.optimizers[recorded.name]}, the recipe's {kind}"
        return
    noted = run.notes.get("clip_norm")
    noted = noted.get(recorded.name) if isinstance(noted, Mapping) else noted
    if noted is not None and noted != stage.clip_norm:
        yield f"clip_norm is {noted!r} in the notes of the run, {stage.clip_norm!r} in the recipe"
    yield from _settings(stage, recorded, run, model)
    yield from _rates(stage, recorded, run, model, examples)
    yield from _batch_sizes(stage, recorded, run, examples)


def _columns(recorded: Stage, run: Run) -> dict[str, int]:
    """The group of each parameter of a stage, as a column of the run's rates."""
    return {name: c for c in run.columns[recorded.name] for name in run.groups[c]}


def _trained(group: Mapping[str, Any], names: Mapping[int, list[str]]) -> Iterator[str]:
    """The names of the parameters of a group that it trains."""
    for parameter in group["params"]:
        if parameter.requires_grad:
            yield from names.get(id(parameter), ())


def _settings(stage: StageRecipe, recorded: Stage, run: Run, model: nn.Module) -> Iterator[str]:
    optimizer, names = stage.make_optimizer(model), optimizers.names_of(model)
    columns, trained, unequal = _columns(recorded, run), set(), {}
    for group in optimizer.param_groups:
        ours = optimizers.hyperparameters(optimizer, group)
        for name in _trained(group, names):
            trained.add(name)
            theirs: Mapping[str, Any] = (
                run.hyperparameters[columns[name]] if name in columns else {}
            )
            for key in sorted(ours.keys() & theirs.keys() - {*IMPLEMENTATION_FLAGS}):
                if ours[key] != theirs[key]:
                    unequal[key] = (
                        f"{key} is {theirs[key]!r} in the run, {ours[key]!r} in the recipe"
                    )
    alone = sorted(trained ^ columns.keys())
    if alone:
        yield f"only one of recipe and run trains {listed(alone, 3)}"
    yield from unequal.values()


def _rates(
    stage: StageRecipe, recorded: Stage, run: Run, model: nn.Module, examples: int
) -> Iterator[str]:
    columns, names = _columns(recorded, run), optimizers.names_of(model)
    groups = stage.make_optimizer(model).param_groups
    # one parameter of every pair of a group of the recipe and a column of the run
    pairs = {(k, columns.get(n)): n for k, g in enumerate(groups) for n in _trained(g, names)}
    table = stage.schedule(model, examples)[: recorded.end - recorded.start]
    arrays = {"learning rate": run.learning_rates, "momentum": run.momentums}
    for k, (what, rows) in enumerate(arrays.items()):
        for (number, column), name in pairs.items():
            if column is None:
                continue
            ours = np.array([optimizers.rate(step[number])[k] for step in table])
            theirs = rows[recorded.start : recorded.start + len(ours), column]
            apart = np.flatnonzero(~np.isclose(ours, theirs, rtol=1e-5, atol=0.0))
            if len(apart):
                at = int(apart[0])
                yield (
                    f"the {what} at update {recorded.start + at + 1} was {theirs[at]:.4g} in the "
                    f"run for {name}, and is {ours[at]:.4g} in the recipe (unequal at {len(apart)} "
                    f"of {len(ours)} updates)"
                )
                break


def _batch_sizes(stage: StageRecipe, recorded: Stage, run: Run, examples: int) -> Iterator[str]:
    if run.batches is None:
        return
    theirs = [len(batch) for batch in run.batches[recorded.start : recorded.end]]
    steps = stage.batches(examples, lambda _: np.arange(examples))
    for (step, batch), size in zip(steps, theirs, strict=False):
        if len(batch) != size:
            yield (
                f"update {recorded.start + step + 1} used {size} examples in the run, and "
                f"{len(batch)} in the recipe"
            )
            return
