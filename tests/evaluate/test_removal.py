"""Subset removal, with trainings in closed form and really trained; and the random floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest, kstest
from support.made import scores_of
from support.models import mlp, regression, train_run, vectors
from torch.utils.data import TensorDataset

import whence
import whence.evaluate.removal as removal
import whence.methods.random as random_method
from whence.evaluate import SubsetRemoval, subset_removal
from whence.methods.random import Random
from whence.retrain import Training
from whence.retrain.recipe import Recipe
from whence.scores import Scores, Top

pytestmark = pytest.mark.filterwarnings("ignore:only .* queries are right")

N, Q = 60, 14
KS = [2, 4, 8, 12]


def data(n: int = N, seed: int = 0) -> TensorDataset:
    return vectors(n, seed=seed)


def recipe_of(task: whence.Task | None = None, **more: Any) -> Recipe:
    settings: dict[str, Any] = {
        "model": lambda: mlp((4, 3)).double(),
        "task": task or whence.Classification(),
        "train": data(),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "batch_size": 10,
        "epochs": 1,
    }
    return Recipe(**(settings | more))


class World:
    """Trainings in closed form: f(q; S, seed) = base_q + Σ_{m ∈ S} effect_qm + noise(seed, q)."""

    def __init__(self, noise: float = 0.3) -> None:
        random = np.random.default_rng(0)
        self.effect = random.normal(size=(Q, N)) / 4
        self.base = 1.5 - self.effect.sum(1) + np.where(np.arange(Q) == 3, -5.0, 0.0)
        self.noise = noise
        self.calls: list[dict[str, Any]] = []
        self.diverging: set[tuple[int, int]] = set()  # (call, training)

    def margin(self, query: int, training: Training) -> float:
        subset = np.arange(N) if training.subset is None else training.subset
        luck = np.random.default_rng([training.seed, query]).normal()
        return float(self.base[query] + self.effect[query, subset].sum() + self.noise * luck)

    def measure(
        self, recipe: Recipe, query: Any, trainings: Sequence[Training], **options: Any
    ) -> NDArray[np.float64]:
        rows = getattr(query, "indices", range(Q))
        self.calls.append({"trainings": list(trainings), "rows": list(rows), **options})
        actual = np.array([[self.margin(q, training) for q in rows] for training in trainings])
        for call, k in self.diverging:
            if call == len(self.calls) - 1:
                actual[k] = np.nan
        return actual


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(removal, "measure", world.measure)
    return world


def by_hand(
    world: World, orders: NDArray[np.int64], queries: Sequence[int], seeds: Sequence[int]
) -> list[float]:
    """Appendix B.3 as it is written, one query after the other: share flipped at each k."""
    flipped_at = []
    for q in queries:
        flipped_at.append(np.inf)
        for k in KS:
            remaining = np.setdiff1d(np.arange(N), orders[q][:k])
            if np.mean([world.margin(q, Training(s, remaining)) for s in seeds]) < 0:
                flipped_at[-1] = k
                break
    return [float(np.mean(np.array(flipped_at) <= k)) for k in KS]


def test_the_protocol_of_the_paper(world: World) -> None:
    world.base[5] -= 1.5  # right under some seeds only
    good, bad = world.effect, np.random.default_rng(1).normal(size=(Q, N))
    by_method = {"good": scores_of(good), "bad": scores_of(bad)}
    actual = subset_removal(
        recipe_of(), by_method, data(Q, 1), KS, queries=8, random_floor=False, seed=20
    )
    assert actual.select_seeds == (20, 21, 22, 23, 24) and actual.seeds == (25, 26, 27)
    full = np.array([[world.margin(q, Training(s)) for q in range(Q)] for s in range(20, 25)])
    right = set(np.flatnonzero((full > 0).all(0)))
    assert (full[:, 5] > 0).any() and not right & {3, 5} and len(right) > 8
    assert actual.right == len(right) and set(actual.queries) <= right and len(actual.queries) == 8
    for name, values in (("good", good), ("bad", bad)):
        orders = np.argsort(-values, axis=1)
        np.testing.assert_allclose(
            actual.flipped(name), by_hand(world, orders, actual.queries, range(25, 28))
        )
    assert actual.flipped("good")[-1] > actual.flipped("bad")[-1]
    # one call for each k, of one subset size, and nothing twice
    selection, *rounds = world.calls
    assert [training.subset for training in selection["trainings"]] == [None] * 5
    for k, call in zip(KS, rounds, strict=False):
        assert {len(training.subset) for training in call["trainings"]} == {N - k}
        asked = [(t.seed, t.subset.tobytes()) for t in call["trainings"]]
        assert len(asked) == len(set(asked))
        assert call["rows"] == actual.queries.tolist()
    assert actual.trainings == sum(len(call["trainings"]) for call in world.calls)


def test_a_flipped_query_is_not_tried_again(world: World) -> None:
    actual = subset_removal(
        recipe_of(), {"good": scores_of(world.effect)}, data(Q, 1), KS, random_floor=False
    )
    margins = actual.margins["good"]
    for column in margins.T:
        first = np.flatnonzero(column < 0)
        if len(first):
            assert np.isnan(column[first[0] + 1 :]).all()
            assert not np.isnan(column[: first[0] + 1]).any()
    tried = [len(call["trainings"]) // 3 for call in world.calls[1:]]
    assert tried == [int((~np.isnan(row)).sum()) for row in margins][: len(tried)]
    assert tried[0] > tried[-1]


def test_nothing_left_to_try_ends_it(world: World) -> None:
    world.base -= 1.4  # right, but only just
    world.noise = 0.0
    actual = subset_removal(
        recipe_of(), {"good": scores_of(world.effect)}, data(Q, 1), KS, random_floor=False
    )
    assert actual.flipped("good").tolist() == [1.0] * 4 and len(world.calls) == 2


def test_equal_subsets_are_trained_once(world: World) -> None:
    scores = scores_of(world.effect)
    by_method = {"one": scores, "two": scores}
    actual = subset_removal(recipe_of(), by_method, data(Q, 1), KS, random_floor=False)
    np.testing.assert_array_equal(actual.margins["one"], actual.margins["two"])
    assert len(world.calls[1]["trainings"]) == 3 * len(actual.queries)


def test_top_scores_and_low_is_better(world: World) -> None:
    """The order is all that counts: kept tops, and a loss's scores, remove the same examples."""
    values = world.effect
    columns = np.argsort(-values, axis=1)[:, :12]
    ends = np.stack([columns, columns])
    top = Top(np.take_along_axis(values[None], ends, 2), ends)
    about: Any = {"measurement": "margin", "unit": "", "higher_is_better": True}
    rows, order = np.random.default_rng(4).permutation(Q), np.random.default_rng(5).permutation(N)
    by_method = {
        "all": scores_of(values),
        "shuffled": scores_of(values[rows][:, order], query_ids=rows, train_ids=order),
        "top": Scores(None, method="Source", top=top, train_ids=np.arange(N), **about),
        "loss": scores_of(-values, measurement="loss", higher_is_better=False),
    }
    actual = subset_removal(recipe_of(), by_method, data(Q, 1), KS, random_floor=False)
    for name in by_method:
        np.testing.assert_array_equal(actual.margins[name], actual.margins["all"])


def test_the_random_floor_is_that_of_the_method(world: World) -> None:
    train, query = data(), data(Q, 1)
    actual = subset_removal(recipe_of(), {}, query, KS, seed=5)
    model, task = mlp((4, 3)), whence.Classification()
    study = whence.Study(model, task, train, train_run(model, task, train, [1]).run)
    values = Random(seed=5).attribute(study, query, dtype=torch.float64).values
    orders = np.argsort(-values, axis=1)
    share = by_hand(world, orders, actual.queries.tolist(), actual.seeds)
    np.testing.assert_allclose(actual.flipped("Random"), share)
    for q, training in zip(actual.queries, world.calls[1]["trainings"][::3], strict=True):
        removed = np.setdiff1d(np.arange(N), training.subset)
        np.testing.assert_array_equal(removed, np.sort(orders[q][: KS[0]]))
        assert set(train.tensors[1][removed].tolist()) == {int(query.tensors[1][q])}


def test_stages(world: World) -> None:
    """Scores over two stages: the columns of the stage whose examples are removed."""
    first = data(7, 2)
    recipe = recipe_of(train={"pretrain": first, "finetune": data()}, batch_size=5)
    both = np.concatenate([np.random.default_rng(3).normal(size=(Q, 7)), world.effect], 1)
    stage = ["pretrain"] * 7 + ["finetune"] * N
    ids = [*range(7), *range(N)]
    by_method = {"good": scores_of(both, stage=stage, train_ids=ids)}
    alone = {"good": scores_of(world.effect)}
    one = subset_removal(recipe_of(), alone, data(Q, 1), KS)
    two = subset_removal(recipe, by_method, data(Q, 1), KS, stage="finetune")
    np.testing.assert_array_equal(one.margins["good"], two.margins["good"])
    assert {t.stage for t in world.calls[-1]["trainings"]} == {"finetune"}
    assert (one.stage, two.stage) == (None, "finetune") and "of finetune" in repr(two)
    with pytest.raises(ValueError, match="stage='other' is not in the recipe"):
        subset_removal(recipe, by_method, data(Q, 1), KS, stage="other")


def test_options_are_passed_on(world: World, tmp_path: Path) -> None:
    options: Any = {"device": "cpu", "memory": 10**9, "executor": "ray", "engine": "vmap"}
    options["progress"] = False
    subset_removal(recipe_of(), {}, data(Q, 1), [2, 4], out=tmp_path, **options)
    folders = [call["out"].name for call in world.calls]
    assert folders == ["all-data", "without-2", "without-4"]
    for call in world.calls:
        assert {name: call[name] for name in options} == options


@pytest.mark.parametrize(
    ("both", "one", "other", "neither", "expected"),
    [
        (36, 12, 2, 0, (0.0569, 0.3404)),  # as published: Newcombe 1998, paired, method 10
        (0, 0, 0, 54, (-0.0664, 0.0664)),
    ],
)
def test_differences_are_of_the_same_queries(
    both: int, one: int, other: int, neither: int, expected: tuple[float, float]
) -> None:
    counts = (both, one, other, neither)
    flips = [np.repeat(which, counts) for which in ([1, 1, 0, 0], [1, 0, 1, 0])]
    margins = {name: 1.0 - 2.0 * f[None] for name, f in zip("ab", flips, strict=True)}
    queries = np.arange(sum(counts))
    actual = SubsetRemoval((7,), margins, queries, len(queries), (0,), (1,), 1, 0)
    (apart,) = actual.difference("a", "b")
    assert apart.value == pytest.approx((one - other) / len(queries))
    assert apart.interval == pytest.approx(expected, abs=5e-5)
    (back,) = actual.difference("b", "a")
    assert back.interval == pytest.approx((-apart.interval[1], -apart.interval[0]))


def test_wilsons_interval_is_scipys(world: World) -> None:
    actual = subset_removal(recipe_of(), {"good": scores_of(world.effect)}, data(Q, 1), KS)
    for share, interval in zip(actual.flipped("good"), actual.interval("good"), strict=True):
        tried = len(actual.queries)
        expected = binomtest(round(share * tried), tried).proportion_ci(method="wilson")
        np.testing.assert_allclose(interval, expected, rtol=1e-5, atol=1e-9)
    assert "good" in repr(actual) and "Random" in actual._repr_html_()


def test_diverged_trainings_are_counted(world: World) -> None:
    world.noise = 0.0
    world.diverging = {(0, 1), (1, 0), (1, 3), (1, 4), (1, 5)}
    actual = subset_removal(
        recipe_of(), {"good": scores_of(world.effect)}, data(Q, 1), KS, random_floor=False
    )
    assert actual.diverged == 5 and "5 diverged" in repr(actual)
    margins = actual.margins["good"]
    assert not np.isnan(margins[0, 0])  # two seeds remain
    assert np.isnan(margins[0, 1])  # none: it has not flipped, and is tried again
    assert not np.isnan(margins[1, 1])
    world.calls.clear()
    world.diverging = {(0, k) for k in range(5)}
    with pytest.raises(ValueError, match="all 5 trainings on all data diverged"):
        subset_removal(recipe_of(), {}, data(Q, 1), KS)


def blobs(n: int, seed: int) -> TensorDataset:
    """Three classes that overlap a little."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    centres = 1.5 * torch.eye(3, 4, dtype=torch.float64)
    noise = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(centres[labels] + noise, labels)


def test_really_trained(tmp_path: Path) -> None:
    train, query = blobs(60, 0), blobs(24, 1)
    recipe = recipe_of(
        train=train,
        batch_size=20,
        epochs=12,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5),
    )
    run = recipe.run(0, checkpoints=4)
    study = whence.Study(recipe.build(0), recipe.task, train, run)
    scores = whence.TracIn().attribute(study, query, dtype=torch.float64, progress=False)
    opposite = scores_of(-scores.values)
    by_method = {"TracIn": scores, "opposite": opposite}
    options: Any = {"queries": 6, "select_seeds": 2, "seeds": 2, "progress": False}
    actual = subset_removal(recipe, by_method, query, [4, 16], out=tmp_path, **options)
    again = subset_removal(recipe, by_method, query, [4, 16], out=tmp_path, **options)
    fresh = subset_removal(recipe, by_method, query, [4, 16], engine="single", **options)
    for name, margins in actual.margins.items():
        np.testing.assert_array_equal(again.margins[name], margins)
        np.testing.assert_allclose(fresh.margins[name], margins, rtol=1e-6)
    # removing what helped lowers the margin more than removing what harmed, and than chance
    left = {name: margins[0].mean() for name, margins in actual.margins.items()}  # all are tried
    assert left["TracIn"] < left["Random"] < left["opposite"]
    assert actual.flipped("TracIn")[-1] > actual.flipped("opposite")[-1]
    # one of the numbers, by an ordinary training
    first = int(actual.queries[0])
    removed = scores.helpful(first, 4).examples
    remaining = np.setdiff1d(np.arange(60), removed)
    batch = tuple(tensor[first : first + 1] for tensor in query.tensors)
    by_seed = []
    for seed in actual.seeds:
        model = recipe.train(seed, remaining)
        margins = recipe.task.measurements(recipe.task.outputs(model, batch), batch)
        by_seed.append(margins.item())
    assert actual.margins["TracIn"][0, 0] == pytest.approx(np.mean(by_seed))


def test_fewer_right_queries_than_asked(world: World) -> None:
    with pytest.warns(UserWarning, match=r"only \d+ of the 14 queries are right .* of 100"):
        subset_removal(recipe_of(), {}, data(Q, 1), [2])
    world.base -= 50
    with pytest.raises(ValueError, match="none of the 14 queries is right under all 5 seeds"):
        subset_removal(recipe_of(), {}, data(Q, 1), [2])


GOOD = np.ones((Q, N))
KEPT = np.ones((2, Q, 3))
TOP = Scores(
    None,
    method="Source",
    measurement="margin",
    unit="",
    higher_is_better=True,
    top=Top(KEPT, KEPT.astype(np.int64)),
    train_ids=np.arange(N),
)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": []}, r"k=\[\]: give numbers"),
        ({"k": [4, 2]}, r"k=\[4, 2\]: give numbers of examples to remove, ascending"),
        ({"k": [0, 2]}, "from 1 up"),
        ({"k": [51]}, "k=51 of 60 examples leaves 9, less than a batch of 10: use k<=50"),
        ({"k": [2, 45]}, r"k=45, but class \d of query \d+ has only \d+ training examples"),
        ({"queries": 0}, "queries=0: there must be at least one"),
        ({"seeds": 0}, "seeds=0"),
        ({"select_seeds": 0}, "select_seeds=0"),
        ({"scores_by_method": {}, "random_floor": False}, "nothing to remove"),
        ({"scores_by_method": {"Random": scores_of(GOOD)}}, "has the reserved name 'Random'"),
        ({"scores_by_method": {"a": scores_of(GOOD[0])}}, "'a' are self-influence"),
        ({"scores_by_method": {"a": scores_of(GOOD[1:])}}, "are of 13 queries, but query has 14"),
        ({"scores_by_method": {"a": scores_of(GOOD[:, 1:])}}, "about 59 training examples"),
        ({"scores_by_method": {"a": scores_of(GOOD * np.nan)}}, "60 scores by Source that are not"),
        ({"scores_by_method": {"a": TOP}}, "keep only the top 3 of each query, but k=4"),
        ({"recipe": recipe_of(whence.Classification("loss"))}, "measures 'loss': subset removal"),
        ({"recipe": recipe_of(whence.Classification("log_prob"))}, "measures 'log_prob'"),
    ],
)
def test_bad_input(changed: dict[str, Any], message: str, world: World) -> None:
    given: dict[str, Any] = {
        "recipe": recipe_of(),
        "scores_by_method": {"good": scores_of(GOOD)},
        "query": data(Q, 1),
        "k": [2, 4],
    }
    with pytest.raises(ValueError, match=message):
        subset_removal(**(given | changed))
    with pytest.raises(TypeError, match=r"are ndarray: give whence\.Scores"):
        subset_removal(**(given | {"scores_by_method": {"a": GOOD}}))


# --- Random ------------------------------------------------------------------------------------


def study_of(task: whence.Task, train: TensorDataset, sizes: tuple[int, ...] = (4, 3)) -> Any:
    model = mlp(sizes)
    return whence.Study(model, task, train, train_run(model, task, train, [1]).run)


def test_random_prefers_the_querys_class(monkeypatch: pytest.MonkeyPatch) -> None:
    train, query = data(200), data(30, 1)
    study = study_of(whence.Classification(), train)
    scores = Random(seed=3).attribute(study, query, dtype=torch.float64, progress=False)
    same = query.tensors[1][:, None].numpy() == train.tensors[1].numpy()
    assert (scores.values[same] > 1).all() and (scores.values[~same] < 1).all()
    assert kstest(scores.values.ravel() % 1, "uniform").pvalue > 0.01
    order = np.corrcoef(scores.values % 1) - np.eye(30)
    assert np.abs(order).max() < 0.4  # each query has an order of its own
    monkeypatch.setattr(random_method, "DRAWS_PER_BLOCK", 1)
    again = Random(seed=3).attribute(study, query, dtype=torch.float64, progress=False)
    np.testing.assert_array_equal(again.values, scores.values)
    few = TensorDataset(*(tensor[:4] for tensor in query.tensors))
    first = Random(seed=3).attribute(study, few, dtype=torch.float64, progress=False)
    np.testing.assert_array_equal(first.values, scores.values[:4])
    other = Random(seed=4).attribute(study, query, progress=False)
    assert not np.allclose(other.values, scores.values)
    assert scores.method == "Random" and scores.settings == {"seed": 3, "stage": None}


def test_random_points_the_way_of_the_measurement() -> None:
    train, query = data(), data(6, 1)
    high = Random().attribute(study_of(whence.Classification(), train), query, progress=False)
    low = Random().attribute(study_of(whence.Classification("loss"), train), query, progress=False)
    np.testing.assert_array_equal(low.values, -high.values)
    for q in range(6):
        helpful = high.helpful(q, 5).examples
        assert helpful == low.helpful(q, 5).examples
        assert set(train.tensors[1][helpful].tolist()) == {int(query.tensors[1][q])}


def test_random_without_classes_and_without_queries() -> None:
    train = regression()
    study = study_of(whence.Regression(), train, (4, 1))
    plain = Random().attribute(study, regression(5, seed=1), progress=False)
    assert (plain.values < 0).all() and (plain.values > -1).all()  # an error is better low
    selves = Random().attribute(study, progress=False)
    assert selves.is_self_influence and selves.shape == (12,)


def test_random_over_stages() -> None:
    train = {"pretrain": data(40, 2), "finetune": data(50, 3)}
    recipe, query = recipe_of(train=train), data(6, 1)
    study = whence.Study(recipe.build(0), recipe.task, train, recipe.run(0, checkpoints=2))
    both = Random().attribute(study, query, progress=False)
    assert both.stage == ["pretrain"] * 40 + ["finetune"] * 50
    assert both.train_ids.tolist() == [*range(40), *range(50)]
    assert not np.allclose(both.values[:, :40] % 1, both.values[:, 40:80] % 1)
    one = Random(stage="finetune").attribute(study, query, progress=False)
    np.testing.assert_array_equal(one.values, both.values[:, 40:])


def test_random_in_a_folder_and_top(tmp_path: Path) -> None:
    train, query = data(), data(6, 1)
    study = study_of(whence.Classification(), train)
    whole = Random().attribute(study, query, out=tmp_path / "all", progress=False)
    again = Random().attribute(study, query, out=tmp_path / "all", progress=False)
    np.testing.assert_array_equal(whole.values, again.values)
    strongest = Random().attribute(study, query, top=3, progress=False)
    assert strongest.helpful(2, 3).examples == whole.helpful(2, 3).examples
    with pytest.raises(ValueError, match="another calculation"):
        Random(seed=1).attribute(study, query, out=tmp_path / "all", progress=False)
    with pytest.raises(ValueError, match="stage='other' is not in the run"):
        Random(stage="other").attribute(study, query)
    with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16: random scores are"):
        Random().attribute(study, query, dtype=torch.bfloat16)
