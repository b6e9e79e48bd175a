"""Carry the committed results over to a new identity of recipes, where it is shown to be the same.

`experiments/results` names the recipe of each task by a digest of `Recipe.identity()`. If that
digests more than before, the results can no longer be resumed, although nothing about the trainings
changed. This tool compares what the recipes do, by means that no identity uses: the data, initial
weights, schedules, orders of the examples and the weights after a few updates, bit by bit.

    git worktree add --detach ../old COMMIT             # of the last commit that could resume them
    here=$PWD; cd ../old
    PYTHONPATH=src:. python $here/tools/carry_results.py describe $here/old.json
    cd $here
    python -m tools.carry_results describe new.json
    python -m tools.carry_results stamp old.json new.json

`stamp` writes a new identity into a result if the old code names it by the identity in the result
and both descriptions are equal. It lists the others, and leaves them alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parents[1] / "experiments/results"
UPDATES, SEEDS, TRIED = 3, (0, 1001), 64


def sha256(*arrays: Any) -> str:
    """SHA-256 of arrays, their shapes and types; by itself, to depend on no version of whence."""
    digest = hashlib.sha256()
    for array in arrays:
        array = np.ascontiguousarray(array)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def weights(model: Any) -> str:
    return sha256(*(tensor.numpy() for _, tensor in sorted(model.state_dict().items())))


def trained(stage: Any, model: Any, seed: int, examples: Any) -> dict[str, Any]:
    """The first updates of a stage, which change the model, and its settings throughout."""
    optimizer, count = stage.make_optimizer(model), len(examples)
    schedule = [
        [sorted((k, repr(v)) for k, v in group.items() if k != "params") for group in groups]
        for groups in stage.schedule(model, count)
    ]
    everyone = torch.from_numpy(examples)
    orders = [stage.order(seed, epoch, everyone) for epoch in range(stage.epochs)]
    blocks, after = [], []
    updates = stage.updates(model, optimizer, seed, examples)
    for update, block in enumerate(updates):  # yields before each update
        if update:
            after.append(weights(model))
        blocks.append(block)
        if update == UPDATES:
            break
    updates.close()
    model.zero_grad(set_to_none=True)
    return {
        "data": sha256(*stage.data.dataset.tensors),
        "task": [type(stage.task).__qualname__, sorted(map(repr, vars(stage.task).items()))],
        "batches": [stage.batch_size, stage.epochs, getattr(stage, "drop_last", False)],
        "optimizer": type(optimizer).__name__,
        "clip_norm": stage.clip_norm,
        "schedule": hashlib.sha256(repr(schedule).encode()).hexdigest(),
        "steps": len(schedule),
        "orders": sha256(*orders),
        "blocks": sha256(*blocks),
        "weights": after,
    }


def describe(experiment: Any, quick: bool) -> dict[str, Any]:
    """What a task's recipe does, and by which identity this version of whence names it."""
    recipe, held_out = experiment.recipe(quick)
    half = np.arange(len(recipe.stage(experiment.stage).data))[::2]
    examples = recipe.examples(half, experiment.stage)
    does: dict[str, Any] = {"held out": sha256(*held_out.tensors)}
    for seed in SEEDS:
        model = recipe.build(seed)
        does[f"initial {seed}"] = weights(model)
        for stage in recipe.stages:
            does[f"{stage.name} {seed}"] = trained(stage, model, seed, examples[stage.name])
        model.eval()
        data, task = recipe.stages[-1].data, recipe.task
        batch = data.take(np.arange(min(TRIED, len(data))))
        query = tuple(column[:TRIED] for column in held_out.tensors)
        with torch.no_grad():
            does[f"losses {seed}"] = sha256(task.losses(task.outputs(model, batch), batch))
            measured = task.measurements(task.outputs(model, query), query)
            does[f"measurements {seed}"] = sha256(measured)
    return {"identity": recipe.identity(), "recipe": recipe.fingerprint, "does": does}


def stamp(name: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """Write the new identity into a result and its texts; or say why not."""
    from whence.persist.files import write_json

    path = RESULTS / f"{name}.json"
    result = json.loads(path.read_text())
    if result["recipe"] == new["recipe"] and result.get("identity") == new["identity"]:
        return "is up to date"
    if result["recipe"] != old["recipe"]:
        return "LEFT: the old code names its recipe otherwise"
    if old["does"] != new["does"]:
        parts = [key for key in new["does"] if old["does"].get(key) != new["does"][key]]
        return f"LEFT: the recipe changed: {', '.join(parts)}"
    texts = RESULTS / "texts" / path.name
    if texts.is_file() and (content := json.loads(texts.read_text()))["recipe"] == old["recipe"]:
        write_json(texts, content | {"recipe": new["recipe"]}, checksum=False)
    result |= {"recipe": new["recipe"], "identity": new["identity"]}
    write_json(path, result, checksum=False)
    return "carried over"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", choices=("describe", "stamp"))
    parser.add_argument("files", type=Path, nargs="+", help="to write; or the old and the new one")
    options = parser.parse_args()
    if options.job == "stamp":
        old, new = (json.loads(file.read_text()) for file in options.files)
        for name in new:
            print(f"{name}.json: {stamp(name, old.get(name, {'recipe': None}), new[name])}")
        return
    from experiments import tasks  # of the folder that this was started in

    file = options.files[0]
    described = json.loads(file.read_text()) if file.is_file() else {}
    for name, experiment in tasks.TASKS.items():
        for quick in (False, True):
            key = f"{name}-quick" if quick else name
            if key not in described and (RESULTS / f"{key}.json").is_file():
                described[key] = describe(experiment, quick)
                file.write_text(json.dumps(described))
                print(key, flush=True)


if __name__ == "__main__":
    main()
