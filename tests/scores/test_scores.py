"""Scores and ScoreWriter: rankings against a full sort, files against kills and damage."""

import builtins
import os
import shutil
import tempfile
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.files import edit_json

from whence.scores import Scores, ScoreWriter, Top

ABOUT = {
    "method": "Source",
    "settings": {"segments": 3},
    "measurement": "margin",
    "unit": "logits",
    "higher_is_better": True,
}


def make(values, **changes):
    return Scores(np.asarray(values, np.float32), **{**ABOUT, **changes})


def by_full_sort(row, highest, k):
    """Columns, strongest first, ties to the lower one: the definition, written out."""
    sign = -1 if highest else 1
    return sorted(range(len(row)), key=lambda c: (sign * float(row[c]), c))[:k]


# Few distinct values, so that ties are common.
matrices = st.tuples(st.integers(1, 4), st.integers(1, 12)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.sampled_from([-2.5, -1, -0.0, 0, 1, 3]))
)


def cuts(draw, length):
    inner = draw(st.sets(st.integers(1, length - 1))) if length > 1 else set()
    ends = [0, *sorted(inner), length]
    return [slice(a, b) for a, b in pairwise(ends)]


@st.composite
def block_orders(draw):
    values = draw(matrices)
    rows, columns = cuts(draw, values.shape[0]), cuts(draw, values.shape[1])
    return values, draw(st.permutations([(r, c) for r in rows for c in columns]))


# --- what scores say ---


@settings(deadline=None)
@given(matrices, st.integers(1, 15), st.booleans())
def test_rankings_follow_the_direction_of_the_measurement(values, k, higher):
    scores = make(values, higher_is_better=higher)
    for q, row in enumerate(values):
        assert scores.helpful(q, k).examples == by_full_sort(row, higher, k)
        assert scores.harmful(q, k).examples == by_full_sort(row, not higher, k)


def test_entries_carry_ids_and_stages():
    scores = make([[1, -2, 3]], train_ids=[10, 11, 10], stage=["a", "a", "b"])
    assert scores.helpful(query=0, k=2) == [(10, 3.0, "b"), (10, 1.0, "a")]
    assert scores.harmful(query=0, k=1)[0].value == -2.0
    assert "11  -2  a" in repr(scores.harmful(0, 1))


def test_removal_effect_is_minus_the_sum():
    scores = make([[1, -2, 3], [4, 5, 6]], train_ids=[7, 3, 9])
    assert scores.removal_effect(query=1, examples=[9, 7]) == -10.0
    assert scores.removal_effect(0, 3) == 2.0
    assert scores.removal_effect(0, np.array([3, 7])) == 1.0
    assert scores.removal_effect(0, range(0)) == 0.0


def test_removal_effect_tells_stages_apart():
    scores = make([[1, 2, 4]], train_ids=[0, 1, 0], stage=["a", "a", "b"])
    assert scores.removal_effect(0, [0], stage="b") == -4.0
    assert scores.removal_effect(0, [1]) == -2.0
    with pytest.raises(ValueError, match="0 occurs in several stages"):
        scores.removal_effect(0, [0, 1])
    with pytest.raises(ValueError, match="stages of these scores are: a, b"):
        scores.removal_effect(0, [0], stage="c")
    with pytest.raises(ValueError, match="1, not among the 1 training ids of stage 'b'"):
        scores.removal_effect(0, [1], stage="b")


def test_self_influence_needs_no_query():
    scores = make([1, -2, 3], train_ids=[5, 6, 7])
    assert scores.helpful(k=1).examples == [7]
    assert scores.removal_effect(None, 6) == 2.0
    with pytest.raises(ValueError, match="do not add up"):
        scores.removal_effect(None, [5, 6])
    with pytest.raises(ValueError, match="self-influence has no queries"):
        scores.helpful(query=0)


def test_repr_says_what_the_numbers_are():
    excluded = [{"name": f"norm{i}.weight", "share": 0.005} for i in range(5)]
    text = repr(make([[1, 2]], excluded=excluded, higher_is_better=False))
    for part in (
        "Source(segments=3)",
        "margin, lower is better",
        "logits",
        "f(with m) - f(without m)",
        "(1, 2): 1 queries x 2 training examples, float32",
        "2.5% of the trained parameters: norm0.weight, norm1.weight, norm2.weight and 2 more",
    ):
        assert part in text


def test_to_numpy_and_pandas():
    scores = make([[1, 2], [3, 4]], train_ids=[8, 9], query_ids=[5, 6])
    assert np.asarray(scores, dtype=np.float64).dtype == np.float64
    copy = scores.to_numpy()
    copy[0, 0] = 99
    assert scores.values[0, 0] == 1
    frame = scores.to_pandas()
    assert frame.loc[6, 9] == 4
    staged = make([[1, 2]], train_ids=[0, 0], stage=["a", "b"]).to_pandas()
    assert staged.loc[0, ("b", 0)] == 2
    assert make([1, 2], train_ids=[8, 9]).to_pandas().loc[9, "value"] == 2


def test_to_pandas_without_pandas_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def without_pandas(name, *rest, **named):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(ImportError, match=r"pip install 'whence-tda\[pandas\]'"):
        make([[1]]).to_pandas()


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda s: s.helpful(2), IndexError, "query=2 is out of range.*queries 0..1"),
        (lambda s: s.helpful(-1), IndexError, "query=-1 is out of range"),
        (lambda s: s.harmful(), ValueError, "say which query: query=0..1"),
        (lambda s: s.helpful(0, k=0), ValueError, "k=0"),
        (lambda s: s.removal_effect(0, [0, 7]), ValueError, r"7, not among the 3 .*\(0..2\)"),
        (lambda s: s.removal_effect(0, [1, 1]), ValueError, "1 more than once"),
        (lambda s: s.removal_effect(0, [True, False, True]), ValueError, "train_ids.mask"),
        (lambda s: s.removal_effect(0, [0.5]), ValueError, "not float64"),
    ],
)
def test_bad_questions_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call(make([[1, 2, 3], [4, 5, 6]]))


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"train_ids": [1]}, r"train_ids is int64 of shape \(1,\): give 2 integers"),
        ({"query_ids": [0.5]}, "query_ids is float64"),
        ({"stage": ["a"]}, "stage names 1 columns, but there are 2"),
        ({"by_segment": np.zeros((3, 2))}, "by_segment has shape"),
        ({"spread": np.zeros(2)}, "spread has shape"),
        ({"top": Top(np.zeros((2, 1, 1)), np.zeros((2, 1, 1), int))}, "exactly one"),
    ],
)
def test_inconsistent_scores_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        make([[1, 2]], **changes)


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="object in diagnostics"):
        make([[1]], diagnostics={"a": object()})


def test_scores_that_are_not_numbers_are_not_ranked():
    with pytest.raises(ValueError, match="query 1 has 1 scores that are not numbers"):
        make([[1, 2], [np.nan, 1]]).helpful(1)


# --- on disk ---


@settings(deadline=None, max_examples=30)
@given(matrices, st.booleans(), st.booleans())
def test_save_and_load_give_the_same_scores(values, single, rich):
    values = values[0] if single else values
    n = values.shape[-1]
    more = {}
    if rich:
        more = {
            "by_segment": np.stack([values, values]),
            "spread": values * 2,
            "stage": ["a"] * (n // 2) + ["b"] * (n - n // 2),
            "diagnostics": {"seconds": {"scores": np.float64(1.5)}, "shape": np.arange(2)},
            "provenance": {"run": Path("runs/a")},
            "excluded": [{"name": "embedding", "share": 0.25}],
        }
    before = make(values, train_ids=np.arange(n) + 3, **more)
    with tempfile.TemporaryDirectory() as folder:
        before.save(folder)
        after = Scores.load(folder)
        assert isinstance(after.values, np.memmap)
        np.testing.assert_array_equal(after.values, values)
        for name in ("by_segment", "spread", "train_ids", "query_ids"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
        for name in ("settings", "stage", "diagnostics", "provenance", "excluded", "shape"):
            assert getattr(after, name) == getattr(before, name)
        assert repr(after) == repr(before)
        assert not [file for file in Path(folder).iterdir() if "tmp" in file.name]
        del after


def test_saving_over_itself_and_over_others(tmp_path):
    make([[1, 2]], spread=np.ones((1, 2))).save(tmp_path)
    loaded = Scores.load(tmp_path)
    loaded.save(tmp_path)
    np.testing.assert_array_equal(loaded.values, [[1, 2]])
    np.testing.assert_array_equal(Scores.load(tmp_path).values, [[1, 2]])
    make([[5, 6, 7]]).save(tmp_path)
    assert Scores.load(tmp_path).shape == (1, 3)
    assert not (tmp_path / "spread.npy").exists()
    np.testing.assert_array_equal(loaded.values, [[1, 2]])  # still mapped to the old file


def damage_truncate(path):
    data = (path / "scores.npy").read_bytes()
    (path / "scores.npy").write_bytes(data[:-4])


def damage_json(path, **changes):
    edit_json(path / "scores.json", **changes)


@pytest.mark.parametrize(
    "damage, error, text",
    [
        (shutil.rmtree, FileNotFoundError, "does not exist"),
        (lambda p: (p / "scores.json").unlink(), FileNotFoundError, "has no scores.json"),
        (lambda p: (p / "scores.json").write_text("{"), ValueError, "scores.json is damaged"),
        (lambda p: damage_json(p, schema=2), ValueError, "has schema 2, this whence reads 1"),
        (lambda p: damage_json(p, arrays={}), ValueError, "scores.json is damaged"),
        (lambda p: damage_json(p, settings=3, excluded=7), ValueError, "is damaged"),
        (lambda p: (p / "scores.npy").unlink(), FileNotFoundError, "scores.npy is missing"),
        (damage_truncate, ValueError, r"scores.npy is damaged \(truncated"),
        (lambda p: (p / "scores.npy").write_bytes(b""), ValueError, r"damaged \(truncated"),
        (lambda p: np.save(p / "scores.npy", np.zeros((2, 2))), ValueError, "do not belong"),
        (
            lambda p: np.save(p / "scores.npy", np.array([{}]), allow_pickle=True),
            ValueError,
            r"damaged \(truncated",
        ),
    ],
)
def test_damaged_folders_are_refused(tmp_path, damage, error, text):
    folder = tmp_path / "scores"
    make([[1, 2, 3]]).save(folder)
    damage(folder)
    with pytest.raises(error, match=text):
        Scores.load(folder)


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        make([[1]]).save(tmp_path / "file")


# --- block by block ---


@settings(deadline=None)
@given(block_orders(), st.integers(1, 14), st.booleans(), st.data())
def test_streaming_top_equals_a_full_sort_in_any_order(ordered, top, higher, data):
    values, blocks = ordered
    writer = ScoreWriter(None, *values.shape, key="a", top=top)
    again = data.draw(st.lists(st.sampled_from(blocks), max_size=3))
    for rows, columns in [*blocks, *again]:
        writer.write(rows, columns, values[rows, columns])
    scores = writer.finish(**{**ABOUT, "higher_is_better": higher})
    n = values.shape[1]
    assert scores.shape == values.shape
    assert scores.strongest.kept == min(top, n)
    for q, row in enumerate(values):
        assert scores.helpful(q, top).examples == by_full_sort(row, higher, top)
        assert scores.harmful(q, top).examples == by_full_sort(row, not higher, top)
        assert [e.value for e in scores.helpful(q, top)] == [
            row[c] for c in by_full_sort(row, higher, top)
        ]


@settings(deadline=None)
@given(block_orders())
def test_blocks_in_memory_make_the_matrix(ordered):
    values, blocks = ordered
    writer = ScoreWriter(None, *values.shape, key="a", segments=2)
    for i, (rows, columns) in enumerate(blocks):
        assert not writer.done(rows, columns)
        part = values[rows, columns]
        writer.write(rows, columns, part, np.stack([part, -part]))
        assert all(writer.done(*block) for block in blocks[: i + 1])
    scores = writer.finish(**ABOUT)
    np.testing.assert_array_equal(scores.values, values)
    np.testing.assert_array_equal(scores.by_segment, np.stack([values, -values]))


def contents(folder):
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


class Killed(BaseException):
    pass


@pytest.fixture
def still_clock(monkeypatch):
    """Noting progress costs no time, so every block is noted."""
    monkeypatch.setattr("whence.persist.files.Throttle.due", lambda _: True)


def score(out, values, *, key="a", top=None, segments=None, width=2, killed_after=None):
    """A method's loop. Returns the scores and how many blocks were computed."""
    writer = ScoreWriter(out, *values.shape, key=key, top=top, segments=segments)
    if writer.already is not None:
        return writer.already, 0
    computed = 0
    for r in range(0, values.shape[0], 2):
        for c in range(0, values.shape[1], width):
            rows, columns = slice(r, r + 2), slice(c, c + width)
            if writer.done(rows, columns):
                continue
            if computed == killed_after:
                raise Killed
            part = values[rows, columns]
            writer.write(rows, columns, part, None if segments is None else np.stack([part] * 2))
            computed += 1
    return writer.finish(**ABOUT), computed


@pytest.mark.usefixtures("still_clock")
@pytest.mark.parametrize("kind", [{}, {"segments": 2}, {"top": 3}])
@pytest.mark.parametrize("killed_after", [0, 1, 4, 9])
def test_a_killed_call_resumes_with_the_same_bits(tmp_path, kind, killed_after):
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)  # 12 blocks
    score(tmp_path / "whole", values, **kind)
    with pytest.raises(Killed):
        score(tmp_path / "parts", values, killed_after=killed_after, **kind)
    with pytest.raises(ValueError, match="not finished: make the same"):
        Scores.load(tmp_path / "parts")
    _, computed = score(tmp_path / "parts", values, **kind)
    assert computed == 12 - killed_after
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    scores, computed = score(tmp_path / "parts", values, **kind)
    assert computed == 0
    assert scores.helpful(1, 1).examples == [int(values[1].argmax())]


@pytest.mark.usefixtures("still_clock")
@pytest.mark.parametrize("top", [None, 3])
def test_a_call_resumed_with_other_blocks_gives_the_same_bits(tmp_path, top):
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    score(tmp_path / "whole", values, top=top)
    with pytest.raises(Killed):
        score(tmp_path / "parts", values, top=top, killed_after=6)
    score(tmp_path / "parts", values, top=top, width=3)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("still_clock")
@pytest.mark.parametrize("kind", [{}, {"segments": 2}, {"top": 3}])
def test_a_kill_at_any_file_operation_loses_nothing(tmp_path, monkeypatch, kind):
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    score(tmp_path / "whole", values, **kind)
    real, left = os.replace, 0

    def replace(source, target):
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    kills = 0
    for operation in range(100):
        out, left = tmp_path / f"kill{operation}", operation
        try:
            score(out, values, **kind)
            break
        except Killed:
            kills += 1
        left = 1000
        score(out, values, **kind)
        assert contents(out) == contents(tmp_path / "whole")
    assert kills > 8


def test_where_noting_is_slow_some_blocks_are_redone_with_the_same_bits(tmp_path, monkeypatch):
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    score(tmp_path / "whole", values)
    seconds = count()
    monkeypatch.setattr("whence.persist.files.monotonic", lambda: float(next(seconds)))
    with pytest.raises(Killed):
        score(tmp_path / "parts", values, killed_after=9)
    _, computed = score(tmp_path / "parts", values)
    assert 12 - 9 < computed <= 12
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_unnoted_data_and_lost_data_are_redone(tmp_path):
    values = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    with pytest.raises(Killed):
        score(tmp_path, values, killed_after=2)
    (tmp_path / "scores.npy.partial").write_bytes(b"")
    scores, computed = score(tmp_path, values)
    assert computed == 3
    np.testing.assert_array_equal(scores.values, values)


@pytest.mark.usefixtures("still_clock")
def test_finished_and_unfinished_work_of_another_calculation_is_left_alone(tmp_path):
    values = np.ones((2, 4), np.float32)
    with pytest.raises(Killed):
        score(tmp_path / "part", values, killed_after=1)
    with pytest.raises(ValueError, match=r"part holds .* another calculation"):
        score(tmp_path / "part", values, key="b")
    score(tmp_path / "whole", values)
    with pytest.raises(ValueError, match=r"model or task, top\): choose another out, or delete"):
        score(tmp_path / "whole", values, key="b", top=1)
    make(values).save(tmp_path / "saved")
    with pytest.raises(ValueError, match="another calculation"):
        score(tmp_path / "saved", values)
    np.testing.assert_array_equal(Scores.load(tmp_path / "whole").values, values)


def test_finished_work_is_still_known_after_saving_it_in_place(tmp_path):
    values = np.ones((2, 4), np.float32)
    scores, _ = score(tmp_path, values)
    scores.save(tmp_path)
    assert score(tmp_path, values)[1] == 0


def test_unreadable_progress_is_said(tmp_path):
    (tmp_path / "progress.json").write_text("{")
    with pytest.raises(ValueError, match=r"progress.json is damaged .* delete the folder"):
        ScoreWriter(tmp_path, 1, 1, key="a")


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("top", [None, 2])
def test_self_influence_block_by_block(tmp_path, on_disk, top):
    values = np.array([3.0, -1.0, 2.0, 5.0])
    out = tmp_path / "scores" if on_disk else None
    writer = ScoreWriter(out, None, 4, key="a", top=top, dtype=np.float64)
    for start in (2, 0):
        part = slice(start, start + 2)
        writer.write(None, part, values[part])
    scores = writer.finish(**ABOUT, train_ids=[10, 11, 12, 13])
    assert scores.shape == (4,)
    assert scores.helpful(k=2) == [(13, 5.0, None), (10, 3.0, None)]
    assert scores.harmful(k=1).examples == [11]
    if top is None:
        assert scores.values.dtype == np.float64


def test_top_only_scores_say_what_they_lack(tmp_path):
    values = np.arange(10, dtype=np.float32)[None]
    writer = ScoreWriter(tmp_path, 1, 10, key="a", top=2)
    writer.write(slice(0, 1), slice(0, 10), values)
    writer.finish(**ABOUT)
    scores = Scores.load(tmp_path)
    assert scores.removal_effect(0, [9, 0]) == -9.0
    assert "only the top 2 at either end" in repr(scores)
    for refused, text in (
        (lambda: scores.values, "attribute without top="),
        (lambda: scores.helpful(0, 3), "k=3, but only the top 2 .* top>=3 or without"),
        (lambda: scores.removal_effect(0, [9, 5]), "scores of 5 were not kept"),
    ):
        with pytest.raises(ValueError, match=text):
            refused()


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda w: w.write(slice(0, 2), slice(0, 2), np.zeros((2, 3))), r"shape \(2, 3\), but"),
        (lambda w: w.write(slice(0, 2), slice(2, 2), np.zeros((2, 0))), "is not a block of 2"),
        (lambda w: w.write(slice(0, 2), slice(0, 3, 2), np.zeros((2, 2))), "with step 1"),
        (lambda w: w.write(None, slice(0, 3), np.zeros(3)), "rows=None is for self-influence"),
        (
            lambda w: w.write(slice(1, 2), slice(1, 3), [[0, np.nan]]),
            "score of query 1 and example 2 is nan",
        ),
        (
            lambda w: w.write(slice(1, 2), slice(1, 3), [[1e200, 0]]),
            "example 1 is inf in float32",
        ),
        (lambda w: w.write(slice(0, 1), slice(0, 1), [[0]], [[[0]]]), "exactly when"),
        (lambda w: w.finish(**ABOUT), r"queries 0..1, examples 0..2 are missing"),
    ],
)
def test_bad_blocks_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call(ScoreWriter(None, 2, 3, key="a"))


@pytest.mark.parametrize("bad", [{"queries": 0}, {"examples": 0}, {"top": 0}, {"segments": 0}])
def test_bad_writers_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}=0"):
        ScoreWriter(None, **{"queries": 1, "examples": 1, "key": "a", **bad})


def test_top_and_segments_exclude_each_other():
    with pytest.raises(ValueError, match="ask for one of the two"):
        ScoreWriter(None, 1, 1, key="a", top=1, segments=1)


def test_a_full_disk_is_noticed_before_the_work(tmp_path):
    with pytest.raises(OSError, match="GiB are free: choose another out"):
        ScoreWriter(tmp_path, 10**8, 10**8, key="a")
