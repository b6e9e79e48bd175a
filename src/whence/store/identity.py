"""What a store was built from, and whether a folder matches it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Subset, TensorDataset

from whence.data import Batches
from whence.engine.dynamics import PRECONDITIONED
from whence.engine.workspace import Workspace
from whence.errors import DamagedFile, InvalidInput, MissingFile, check_choice
from whence.operators import FISHERS
from whence.persist.files import check_types, parsing, read_json
from whence.run import Run
from whence.store.rows import FORMS
from whence.study import Study, model_identity, task_identity

SCHEMA = 2
REMEDY = "delete the store, and build it again"
DTYPES = ("float16", "bfloat16", "float32", "float64")
METHODS = ("tracin", "influence", "trak", "source")
PROJECTIONS = ("random", "two-sided", "eigenbasis")
#: which are not written
DEFAULTS: dict[str, dict[str, Any]] = {"settings": {"rows": "full", "preconditioned": False}}


def only_run(study: Study) -> Run:
    if len(study.runs) != 1:
        raise InvalidInput(
            f"a store holds one run, and the study has {len(study.runs)}: build a store for each, "
            "and average their scores with whence.scores.ensemble"
        )
    study.refuse_candidates("a store")
    return study.runs[0]


def check_choices(projection: str, fisher: str, rows: str, methods: Sequence[str]) -> None:
    given: list[tuple[str, str, Iterable[str]]] = [
        ("projection", projection, PROJECTIONS),
        ("fisher", fisher, FISHERS),
        ("rows", rows, FORMS),
    ]
    given += [("methods", name, METHODS) for name in methods]
    for choice in given:
        check_choice(*choice)
    if not methods:
        raise InvalidInput(f"methods is empty: name at least one of {', '.join(METHODS)}")


def adaptive(run: Run) -> bool:
    """Whether an Adam-type optimizer trained any stage."""
    return any(run.optimizers[stage.name] in PRECONDITIONED for stage in run.stages)


def needs_preconditioner(run: Run, projection: str, methods: Collection[str]) -> bool:
    """Whether rows are of preconditioned gradients: where a store is for SOURCE alone, of a run of
    an Adam-type optimizer."""
    if set(methods) != {"source"} or not adaptive(run):
        return False
    if not all(run.optimizers[stage.name] in PRECONDITIONED for stage in run.stages):
        raise InvalidInput(
            "the run had an Adam-type optimizer in some stages and SGD in others, which a store "
            "for SOURCE cannot hold: use whence.Source itself"
        )
    if projection == "eigenbasis":
        raise InvalidInput(
            "projection='eigenbasis' is of plain gradients, and SOURCE for Adam-type optimizers "
            "needs preconditioned ones: use 'two-sided' or 'random'"
        )
    return True


def identity_of(workspace: Workspace) -> dict[str, Any]:
    """Weights, model, task and layers. The data is compared separately, because it may grow."""
    study = workspace.study
    return {
        "run": workspace.run.fingerprint,
        "models": {stage: model_identity(model) for stage, model in study.models.items()},
        "tasks": {stage: task_identity(task) for stage, task in study.tasks.items()},
        "layers": [[b.name, b.o, b.width] for b in workspace.trained_blocks()],
    }


def read(folder: Path) -> dict[str, Any]:
    file = folder / "store.json"
    if not file.is_file():
        what = "has no store.json" if folder.is_dir() else "does not exist"
        raise MissingFile(f"{folder} {what}: give a folder that GradientStore.build wrote")
    description = read_json(file, schema=SCHEMA, remedy=REMEDY)
    known = {"settings", "identity", "data", "methods", "partial", "moments", "complete"}
    missing = known - description.keys()
    if missing:
        names = ", ".join(sorted(missing))
        raise DamagedFile(f"{file} is incomplete ({names} missing): {REMEDY}")
    with parsing(file, REMEDY):
        check_types(description, settings=dict, identity=dict, data=dict, partial=dict)
        check_types(description, moments=dict, methods=list, complete=bool)
        check_types({"warnings": []} | description, warnings=list)
        check_types(description["settings"], dimension=int, projection=str, joint=bool)
        check_types(description["settings"], fisher=str, seed=int, dtype=str)
        if description["settings"]["dtype"] not in DTYPES:
            raise InvalidInput(f"dtype is {description['settings']['dtype']!r}")
        for name in [*description["methods"], *description.get("warnings", [])]:
            check_types({"name": name}, name=str)
        if description["settings"].get("rows", "full") not in FORMS:
            raise InvalidInput(f"rows is {description['settings']['rows']!r}")
        for known_data in description["data"].values():
            check_types(known_data, examples=int, sha256=str)
        for entry in description.setdefault("rows", {}).values():
            check_types(entry, shape=list, dtype=str, crc32=str)
        for progress in description["partial"].values():
            if not isinstance(progress, int):  # as earlier versions wrote it
                check_types(progress, rows=int, crc32=str)
        for ranges in description["moments"].values():
            for first, last, count in ranges:
                check_types({"a": first, "b": last, "c": count}, a=int, b=int, c=int)
    return description


def check_same(
    folder: Path, description: Mapping[str, Any], wanted: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse a store that was built from something else, and name the differences."""
    words = {
        "run": "other weights or rates of the run",
        "models": "another model",
        "tasks": "another task",
        "layers": "other layers",
    }
    for group, values in wanted.items():
        expected = json.loads(json.dumps(values))
        built: dict[str, Any] = DEFAULTS.get(group, {}) | description[group]
        expected = DEFAULTS.get(group, {}) | expected
        differs = [k for k in expected if built.get(k) != expected[k]]
        if differs:
            differences = [
                words.get(k, f"{k}={built.get(k)!r}, not {expected[k]!r}") for k in differs
            ]
            raise InvalidInput(
                f"the store in {folder} was built with {'; '.join(differences)}. Choose another "
                "path, or delete that folder"
            )


def check_data(folder: Path, stage: str, known: Mapping[str, Any], data: Batches) -> None:
    """Check that the store's examples are the first of the data's."""
    count = known["examples"]
    if len(data) < count or digest_of(data, count) != known["sha256"]:
        raise InvalidInput(
            f"the store in {folder} was built from other data: the first {count} examples of "
            f"{data.name} are not its own (the data may only grow at its end)"
        )


def digest_of(data: Batches, count: int) -> str:
    """SHA-256 of the first examples."""
    first: Any = Subset(data.dataset, range(count))
    if type(data.dataset) is TensorDataset:
        first = TensorDataset(*(tensor[:count] for tensor in data.dataset.tensors))
    return Batches(data.name, first, data.collate).fingerprint()
