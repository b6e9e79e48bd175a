"""Truth: measurements of models that were retrained on known subsets."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from whence.data import Batches
from whence.draws import keys, uniforms
from whence.errors import InvalidInput, MissingFile, finite, flag, whole
from whence.persist.arrays import load_array, save_array
from whence.persist.files import as_path, check_types, make_folder, parsing, read_json, write_json
from whence.retrain.grid import Grid
from whence.retrain.measure import TrainingOptions, identity, run_grid
from whence.retrain.recipe import Recipe, fingerprint_of
from whence.retrain.training import Training
from whence.table import one_line

SCHEMA = 1
FIELDS = (
    "alpha",
    "seeds",
    "measurement",
    "unit",
    "higher_is_better",
    "stage",
    "recipe",
    "query",
    "data",
    "in_place",
)


class Truth:
    """Measurements of models trained on M subsets with R seeds each.

    Attributes:
        masks: (M, n) bool, which of the n training examples (of `stage`) each subset contains.
        measurements: (M, R, q) float64; NaN where a training diverged.
        alpha: the share of the examples in a subset.
        seeds: (R,), the same for every subset, so that the effect of a seed on all subsets cancels
            in differences between subsets.
        measurement, unit, higher_is_better: of the task.
        stage: the stage whose data was resampled; None for a recipe of one stage.
        recipe, query, data: fingerprints; data is that of the training data of `stage`.
        in_place: the protocol. False (*expected*): each model trains on the subset alone, with
            its own batches and seeds. True (*single model*): each is the model of all examples,
            trained again with its seed and its batches, and the examples outside the subset have
            weight zero in the loss. Then every seed is a separate model.
        notes: how the models were trained: together, or one at a time and why.
    """

    def __init__(
        self,
        masks: ArrayLike,
        measurements: ArrayLike,
        *,
        alpha: float | None = None,
        seeds: Sequence[int] | None = None,
        measurement: str = "measurement",
        unit: str = "",
        higher_is_better: bool = True,
        stage: str | None = None,
        recipe: str = "",
        query: str = "",
        data: str = "",
        in_place: bool = False,
        notes: dict[str, Any] | None = None,
    ) -> None:
        try:
            self.masks: NDArray[np.bool_] = np.asarray(masks)
            self.measurements: NDArray[np.float64] = np.asarray(measurements, np.float64)
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"masks must be booleans (M, n), and measurements numbers (M, R, q): {error}"
            ) from None
        if self.masks.ndim != 2 or self.masks.dtype != bool:
            raise InvalidInput(
                f"masks are {self.masks.dtype} of shape {self.masks.shape}: give booleans (M, n)"
            )
        if self.measurements.ndim != 3 or len(self.measurements) != len(self.masks):
            raise InvalidInput(
                f"measurements have shape {self.measurements.shape} for {len(self.masks)} masks: "
                "give (M, R, q)"
            )
        repeats = self.measurements.shape[1]
        self.seeds = list(range(repeats)) if seeds is None else [whole("seeds", s) for s in seeds]
        if len(self.seeds) != repeats:
            raise InvalidInput(
                f"{len(self.seeds)} seeds for {repeats} repeats: give one per repeat"
            )
        self.alpha = float(self.masks.mean()) if alpha is None else finite("alpha", alpha)
        self.measurement, self.unit = measurement, unit
        self.higher_is_better, self.stage = bool(higher_is_better), stage
        self.recipe, self.query, self.data = recipe, query, data
        self.in_place = bool(in_place)
        self.notes = dict(notes or {})

    @property
    def protocol(self) -> str:
        """What the measurements are of, in words."""
        return "single model" if self.in_place else "expected"

    def of_seed(self, seed: int) -> Truth:
        """The measurements of one seed: in place, those of one model."""
        if seed not in self.seeds:
            raise InvalidInput(f"seed={seed} is not in this truth: it has {self.seeds}")
        at = self.seeds.index(seed)
        about = {name: getattr(self, name) for name in FIELDS} | {"seeds": [seed]}
        return Truth(self.masks, self.measurements[:, at : at + 1], notes=self.notes, **about)

    @property
    def means(self) -> NDArray[np.float64]:
        """The mean over the seeds, (M, q); NaN where one of them diverged."""
        return np.asarray(self.measurements.mean(1))

    @property
    def diverged(self) -> NDArray[np.bool_]:
        """Which trainings diverged, (M, R)."""
        return np.asarray(np.isnan(self.measurements).any(2))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a folder with masks.npy, measurements.npy and, last, truth.json."""
        folder = as_path(path)
        make_folder(folder)
        arrays = {
            "masks": save_array(folder / "masks.npy", self.masks),
            "measurements": save_array(folder / "measurements.npy", self.measurements),
        }
        content = {name: getattr(self, name) for name in (*FIELDS, "notes")}
        write_json(folder / "truth.json", {"schema": SCHEMA, **content, "arrays": arrays})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Truth:
        """Open what `save` or `ground_truth(out=...)` wrote."""
        folder = as_path(path)
        file = folder / "truth.json"
        if not file.is_file():
            unfinished = (folder / "grid.json").is_file()
            raise MissingFile(
                f"the trainings in {folder} are not finished: repeat ground_truth(out=...) to "
                "resume"
                if unfinished
                else f"{folder} {'has no truth.json' if folder.exists() else 'does not exist'}: "
                "give a folder that `whence truth` wrote, or ground_truth(out=...)"
            )
        remedy = "delete the folder, and repeat the ground_truth call"
        content = read_json(file, schema=SCHEMA, remedy=remedy)
        with parsing(file, remedy):
            content = dict[str, Any](in_place=False, data="") | content  # not in earlier versions
            check_types(content, alpha=float, seeds=list, measurement=str, unit=str, notes=dict)
            check_types(content, higher_is_better=bool, recipe=str, query=str, in_place=bool)
            check_types(content, data=str)
            arrays = content["arrays"] if "arrays" in content else _without_checksums(content)
            return cls(
                load_array(folder / "masks.npy", arrays["masks"], remedy=remedy),
                load_array(folder / "measurements.npy", arrays["measurements"], remedy=remedy),
                notes=content["notes"],
                **{name: content[name] for name in FIELDS},
            )

    def __repr__(self) -> str:
        subsets, repeats, queries = self.measurements.shape
        diverged = int(self.diverged.sum())
        return one_line(
            f"Truth({subsets} subsets of {self.alpha:.4g} of {self.masks.shape[1]:,} examples"
            + (f" of stage {self.stage!r}" if self.stage else "")
            + f" x {repeats} seeds, {queries} queries, {self.measurement}"
            + ("; single model: dropped in place" if self.in_place else "")
            + (f"; {diverged} trainings diverged" if diverged else "")
            + ")"
        )


def _without_checksums(content: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, as earlier versions described them."""
    shape = list(content["shape"])
    return {
        "masks": {"shape": [shape[0], content["examples"]], "dtype": "bool"},
        "measurements": {"shape": shape, "dtype": "float64"},
    }


def ground_truth(
    recipe: Recipe,
    query: Any,
    alpha: float = 0.5,
    subsets: int = 100,
    seeds: int | Sequence[int] | None = None,
    stage: str | None = None,
    *,
    in_place: bool = False,
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    **options: Unpack[TrainingOptions],
) -> Truth:
    """Retrain on random subsets, and measure the queries.

    Two protocols are in use. By default, a model trains on its subset alone, and the mean over
    seeds is what a training on the subset gives in *expectation*. With `in_place`, the training on
    all data is repeated with the same seed and batches, and only the losses of the dropped examples
    count as zero: this measures what the data did to that *single model*. Rank methods under each
    protocol separately: which method is best depends on it.

    Args:
        recipe: how to train.
        query: the queries to measure after each training.
        alpha: the share of the training examples in a subset, which has ⌈alpha n⌉ of them.
        subsets: M. Subset j does not depend on M, so you can add more later in the same folder.
        seeds: R, or the seeds themselves; every subset is trained with each (default: 10; in
            place, one, which is seed 0).
        stage: the stage whose data is resampled (default: the first).
        in_place: keep the batches of the training on all examples, and give the dropped ones
            weight zero in the loss. Their places stay: the mean still divides by all of the batch,
            and batch norm still sees them. Each seed is then a separate model: judge the scores
            of its run. alpha = 0.99 drops 1 %, as is usual.
        out: folder for trainings and truth. Repeat the same call to resume.
        seed: determines the subsets.
        options: `device`, `memory`, `executor`, `engine`, `progress`: as in
            `whence.retrain.measure`.
    """
    chosen, data = recipe.stage(stage), Batches("query", query, recipe.collate)
    alpha, in_place = finite("alpha", alpha), flag("in_place", in_place)
    masks = draw_subsets(len(chosen.data), alpha, subsets, seed)
    if seeds is None:
        seeds = 1 if in_place else 10
    given = seeds if isinstance(seeds, Iterable) else range(whole("seeds", seeds))
    named = [whole("seeds", s) for s in given]
    if not named:
        raise InvalidInput(f"seeds={seeds}: train each subset at least once")
    if len(set(named)) != len(named):
        raise InvalidInput(f"seeds={named} name one twice: use each once")
    if not in_place and masks[0].sum() < chosen.batch_size:
        raise InvalidInput(
            f"alpha={alpha} of {len(chosen.data)} examples are {int(masks[0].sum())}, fewer than "
            f"batch_size={chosen.batch_size}: use a larger alpha"
        )
    about = identity(recipe, data)
    about |= {"alpha": alpha, "stage": chosen.name, "subsets": seed}  # one truth per folder
    about |= {"in_place": True} if in_place else {}
    grid = Grid(out, about, len(data))
    trainings = [
        Training(s, None, chosen.name, weights=mask)
        if in_place
        else Training(s, np.flatnonzero(mask), chosen.name)
        for s in named
        for mask in masks
    ]
    rows = run_grid(recipe, data, trainings, grid, **options)
    truth = Truth(
        masks,
        rows.reshape(len(named), subsets, -1).transpose(1, 0, 2),
        alpha=alpha,
        seeds=named,
        measurement=recipe.task.measurement,
        unit=recipe.task.unit,
        higher_is_better=recipe.task.higher_is_better,
        stage=chosen.name if len(recipe.stages) > 1 else None,
        recipe=fingerprint_of(about["recipe"]),
        query=about["query"],
        data=chosen.data.fingerprint(),
        in_place=in_place,
        notes=grid.notes,
    )
    if out is not None:
        with grid.lock("grid"):
            truth.save(out)
    return truth


def draw_subsets(examples: int, alpha: float, count: int, seed: int = 0) -> NDArray[np.bool_]:
    """`count` random subsets of ⌈alpha n⌉ examples, (M, n). Each depends on its index only."""
    if not 0 < alpha < 1:
        raise InvalidInput(
            f"alpha={alpha} must be above 0 and at most 1 - 1/n = {1 - 1 / examples}"
        )
    if whole("subsets", count) < 1:
        raise InvalidInput(f"subsets={count}: draw at least one")
    size = math.ceil(alpha * examples - 1e-9)
    if size >= examples:
        raise InvalidInput(
            f"alpha={alpha} of {examples} examples are all of them: use at most 1 - 1/n = "
            f"{1 - 1 / examples}"
        )
    numbers, everyone = torch.arange(count).unsqueeze(1), torch.arange(examples)
    drawn = uniforms(keys(whole("seed", seed), numbers, everyone), 1).squeeze(-1)
    masks = np.zeros((count, examples), bool)
    np.put_along_axis(masks, drawn.argsort(dim=1, stable=True)[:, :size].numpy(), True, 1)
    return masks
