"""Several processes: the scores of one, in a share of the time and memory each."""

from __future__ import annotations

import json
import linecache
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import ranks
from support.comparing import close

import whence


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    ranks.record(folder)
    return folder


@pytest.fixture(scope="module")
def pair(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, by two processes."""
    folder, copy = tmp_path_factory.mktemp("pair"), tmp_path_factory.mktemp("copy") / "runs"
    shutil.copytree(runs, copy)
    body = f"ranks.everything(Path({str(copy)!r}), folder, rank)"
    ranks.together(folder, body)
    return folder


@pytest.mark.parametrize("name", ranks.CASES)
def test_two_processes_give_the_scores_of_one(
    name: str, runs: Path, pair: Path, tmp_path: Path
) -> None:
    folder = pair / name.replace(" ", "-")
    failed = [file.read_text() for file in sorted(folder.glob("rank-*.txt"))]
    assert not failed, failed[0]
    first, second = (np.load(folder / f"rank-{rank}.npy") for rank in (0, 1))
    np.testing.assert_array_equal(first, second)
    close(first, ranks.values(ranks.CASES[name](runs, tmp_path)), 1e-7)


def known(pair: Path, what: str) -> list[Any]:
    """What each rank reported."""
    return [json.loads((pair / f"{rank}.json").read_text())[what] for rank in (0, 1)]


def test_each_rank_takes_its_share_and_owns_its_blocks(pair: Path) -> None:
    first, second = known(pair, "shares")
    # covariances and eigenvalues at 3 checkpoints, of 23 examples
    assert (first["train sampled"], second["train sampled"]) == (2 * 3 * 12, 2 * 3 * 11)
    assert first["train loss"] + second["train loss"] == 3 * 23
    assert min(first["train loss"], second["train loss"]) >= 3 * 8
    assert (first["query measurement"], second["query measurement"]) == (3 * 3, 3 * 2)
    whole = sum(8 * (o * o + w * w + o * w) for o, w in ((6, 5), (5, 7), (3, 6)))
    assert first["factors"] + second["factors"] == whole
    assert max(first["factors"], second["factors"]) < 0.65 * whole


@pytest.mark.parametrize("cache", ["memory", "disk", "read"])
def test_a_rank_needs_about_half_of_the_memory_for_factors(
    cache: str, pair: Path, tmp_path: Path
) -> None:
    """Also while they are fitted, written and read."""
    one = ranks.factor_bytes(tmp_path)
    for each in known(pair, "factors"):
        assert each[cache] <= 0.6 * one[cache]
        assert each[f"{cache}, left"] <= 0.6 * one[f"{cache}, left"]
        close(each[f"{cache}, scores"], one[f"{cache}, scores"], 1e-6)


@pytest.mark.slow
def test_three_ranks_and_what_they_fitted(runs: Path, tmp_path: Path) -> None:
    """The same bits again; and their factors serve one process, to the last bit of the file."""
    body = f"""
for turn in range(2):
    study = ranks.study(Path({str(runs)!r}), cache=folder / f"cache-{{turn}}")
    scores = whence.Source(segments=2).attribute(study, ranks.QUERY, progress=False)
    np.save(folder / f"{{turn}}-{{rank}}.npy", scores.values)
few = torch.utils.data.Subset(ranks.QUERY, [1])  # fewer queries than ranks
study = ranks.study(Path({str(runs)!r}), cache=folder / "cache-0")
scores = whence.Source(segments=2).attribute(study, few, progress=False)
np.testing.assert_allclose(scores.values[0], np.load(folder / "0-0.npy")[1], rtol=1e-4, atol=1e-6)
"""
    ranks.together(tmp_path, body, size=3)
    first = np.load(tmp_path / "0-0.npy")
    assert len(list(tmp_path.glob("*.npy"))) == 6
    for file in sorted(tmp_path.glob("*.npy")):
        np.testing.assert_array_equal(np.load(file), first)
    caches = [tmp_path / f"cache-{turn}" for turn in (0, 1)]
    files = {file: file.stat().st_mtime_ns for file in caches[0].iterdir()}
    assert {file.name for file in files} == {file.name for file in caches[1].iterdir()}
    method, options = whence.Source(segments=2), {"progress": False}
    alone = method.attribute(ranks.study(runs, cache=caches[0]), ranks.QUERY, **options)
    assert {file: file.stat().st_mtime_ns for file in caches[0].iterdir()} == files
    close(first, alone.values, 1e-6)
    fresh = method.attribute(ranks.study(runs, cache=tmp_path / "one"), ranks.QUERY, **options)
    close(first, fresh.values, 1e-6)


# --- a rank is lost, or differs -----------------------------------------------------------------

DIES = """
from whence.scores import ScoreWriter
written = ScoreWriter.write
def dying(self, *block):
    written(self, *block)
    if {condition}:
        os._exit(9)
ScoreWriter.write = dying
"""


@pytest.mark.slow
def test_a_lost_rank_ends_the_others_and_the_same_call_resumes(runs: Path, tmp_path: Path) -> None:
    """Killed as two processes, resumed by three, killed again, and finished by one."""
    body = f"""
study = ranks.study(Path({str(runs)!r}), cache=folder / "cache")
whence.TracIn().attribute(study, ranks.QUERY, out=folder / "scores", batch_size=2,
                          dtype=torch.float64, progress=False)
"""
    done = []
    for size, mortal in ((2, 1), (3, 0)):
        (tmp_path / "meeting").unlink(missing_ok=True)
        dies = DIES.format(condition=f"rank == {mortal}")
        processes = ranks.start(tmp_path, dies + body, size)
        errors = ranks.outcome(processes)
        assert processes[mortal].returncode == 9
        for rank in set(range(size)) - {mortal}:
            assert processes[rank].returncode == 1
            assert "RankFailed" in errors[rank] and "Run the same command to resume" in errors[rank]
        written = np.zeros((5, 23), bool)
        for file in (tmp_path / "scores").glob("progress*.json"):
            for r0, r1, c0, c1 in json.loads(file.read_text())["done"]:
                written[r0:r1, c0:c1] = True
        done.append(int(written.sum()))
    assert 0 < done[0] <= done[1] < 5 * 23
    one = ranks.study(runs)
    options = {"dtype": torch.float64, "progress": False}
    out = tmp_path / "scores"
    finished = whence.TracIn().attribute(one, ranks.QUERY, out=out, batch_size=2, **options)
    close(finished.values, whence.TracIn().attribute(one, ranks.QUERY, **options).values, 1e-12)
    assert not list(out.glob("progress*"))


def test_an_error_of_one_rank_reaches_all(pair: Path) -> None:
    """And the group is of use afterwards, where the error is caught."""
    first, second = known(pair, "failing")
    assert "rank 1 of 2 failed (example 7 is bad)" in first and second == "example 7 is bad"


def test_a_pass_that_ranks_add_up_together_resumes(pair: Path) -> None:
    """In the middle of it, with the same bits."""
    messages = []
    for whole, again, message, examples, left in known(pair, "resumed"):
        assert whole == again
        messages.append(message)
        assert left <= examples - 12  # of 12 or 11 in a pass
    assert "rank 1 of 2 failed" in messages[0] and messages[1] == "a bad example"


def test_each_rank_cuts_the_vectors_of_its_own_queries_to_low_rank(pair: Path) -> None:
    first, second = known(pair, "cut_vectors")
    assert [first["rows"], second["rows"]] == [3, 2]  # of 5 queries, in each block
    assert max(first["sent"], second["sent"]) < first["whole"]


def test_a_full_disk_of_one_rank_ends_all_and_the_same_call_resumes(pair: Path) -> None:
    (first, values), (second, others) = known(pair, "full_disk")
    assert "rank 1 of 2 failed" in first
    assert "the disk is full" in second and "make the same call again" in second
    assert values == others
    np.testing.assert_array_equal(values, np.load(pair / "source" / "rank-0.npy"))


@pytest.mark.parametrize("name", ranks.DIFFERENT)
def test_ranks_that_differ_are_named(name: str, pair: Path) -> None:
    first, second = known(pair, "differing")
    assert f"the processes differ in {name}: rank 1 of 2 is unlike rank 0" in first[name]
    assert first == second


def test_a_rank_that_ends_before_the_others_wait_for_it_leaves_its_reason(
    runs: Path, tmp_path: Path
) -> None:
    """Rank 1 has fewer examples than the run was trained on, so it has no study."""
    body = f"""
data = torch.utils.data.Subset(ranks.TRAIN, range(23 - 8 * rank))
study = whence.Study(ranks.net(), ranks.TASK, data, Path({str(runs / "sgd")!r}))
whence.TracIn().attribute(study, ranks.QUERY, progress=False)
"""
    first, second = ranks.outcome(ranks.start(tmp_path, body))
    for message, kind in ((first, "RankFailed"), (second, "InvalidInput")):
        assert kind in message and "used example 22, but the data has 15" in message
    assert "the last error of rank 1: the run's batches" in first


def test_ranks_that_make_other_calls_end_together(pair: Path) -> None:
    for message in known(pair, "other_calls"):
        assert "are not in step" in message and "the same calls in the same order" in message


def test_a_process_without_a_group_is_warned(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, at the line that calls whence. Every answer has the warning, also one of a store."""
    monkeypatch.setattr("whence.errors._shown", set())
    given = ranks.study(runs)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="no process group is initialised") as caught:
        methods: list[Any] = [whence.TracIn(), whence.TracIn(), whence.Random()]
        answers = [m.attribute(given, ranks.QUERY, progress=False) for m in methods]
        whence.GradientStore.build(given, tmp_path, 6, methods=["tracin"], progress=False)
        store = whence.GradientStore.open(tmp_path, given)
        answers += [store.tracin(ranks.QUERY, progress=False) for _ in range(2)]
    (shown,) = (w for w in caught if "process group" in str(w.message))
    assert shown.filename == __file__
    assert "answers = [m.attribute(" in linecache.getline(__file__, shown.lineno)
    for scores in answers:
        assert sum("process group" in message for message in scores.warnings) == 1


SRUN = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    "nodes, host",
    [("gpu[03-05,9],cpu1", "gpu03"), ("a1,a2", "a1"), ("n[1-2]-ib", "n1-ib"), ("one", "one")],
)
def test_srun_says_which_process_this_is(
    nodes: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.cli import processes

    for name, value in {**SRUN, "SLURM_STEP_NODELIST": nodes}.items():
        monkeypatch.setenv(name, value)
    assert (processes.rank(), processes.count()) == (1, 2)
    assert processes.meeting() == f"tcp://{host}:24711"
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert processes.meeting() == "tcp://10.0.0.1:29501"
    for name, value in {"WORLD_SIZE": "3", "RANK": "2"}.items():  # torchrun inside a step
        monkeypatch.setenv(name, value)
    assert (processes.rank(), processes.count()) == (2, 3)
    assert processes.meeting() == "env://"


def test_a_batch_script_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from whence.cli import processes

    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert processes.count() == 1


def test_the_scripts_of_the_page_are_sound() -> None:
    page = (Path(__file__).parents[2] / "docs/distributed.md").read_text()
    scripts = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert sum("#SBATCH" in script for script in scripts) == 2
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


STUDY = """
from pathlib import Path
from support import ranks
study = ranks.study(Path({runs!r}), cache={cache!r})
query = ranks.QUERY
"""

# The group's threads must have ended when Python does: one that needs the interpreter then aborts.
ENDS = """
import atexit, os, torch, weakref
group = weakref.ref(torch.distributed.group.WORLD)
atexit.register(lambda: group() is None or os._exit(3))
"""


@pytest.mark.slow
def test_srun(runs: Path, tmp_path: Path) -> None:
    """Two tasks of a step, as `srun` starts them."""
    file = tmp_path / "study.py"
    file.write_text(STUDY.format(runs=str(runs), cache=str(tmp_path / "cache")))
    command = [sys.executable, "-m", "whence", "attribute", str(file), "--json"]
    command += ["--method", "tracin", "--out", str(tmp_path / "scores")]
    known = {**os.environ, **SRUN, "SLURM_STEP_NODELIST": "localhost"}
    known |= {"PYTHONPATH": os.pathsep.join(sys.path), "MASTER_PORT": "29619"}
    processes = [
        subprocess.Popen(
            command,
            env={**known, "SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = ranks.outcome(processes)
    assert not any(process.returncode for process in processes), "\n".join(errors)
    assert whence.Scores.load(tmp_path / "scores").provenance["processes"] == 2


def test_torchrun(runs: Path, tmp_path: Path) -> None:
    """The command line joins a group by itself; the first process alone answers."""
    file = tmp_path / "study.py"
    file.write_text(STUDY.format(runs=str(runs), cache=str(tmp_path / "cache")) + ENDS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=29617", "-m", "whence", "attribute", str(file), "--json"]
    command += ["--method", "influence", "--out", str(tmp_path / "scores")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)  # one answer, of one process
    assert answer["provenance"]["processes"] == 2
    scores = whence.Scores.load(tmp_path / "scores")
    alone = whence.Influence().attribute(ranks.study(runs), ranks.QUERY, progress=False)
    close(scores.values, alone.values, 1e-6)
