"""Attribution by the workers of a Ray cluster: two local ones, of which one is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ranks
from support.comparing import close

import whence


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    tests = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    yield
    ray.shutdown()


@pytest.mark.slow
def test_workers_share_the_work_and_a_killed_one_is_replaced(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.record(tmp_path)
    monkeypatch.chdir(tmp_path)  # relative paths mean the same on a worker
    task = ranks.Mortal()
    study = whence.Study(ranks.net(), task, ranks.TRAIN, "sgd", cache="cache")
    alone = whence.Source(segments=2).attribute(study, ranks.QUERY, **ranks.EXACT)
    method, options = whence.Source(segments=2), {**ranks.EXACT, "executor": "ray"}
    shared = whence.Study(ranks.net(), task, ranks.TRAIN, "sgd", cache="shared")
    scores = method.attribute(shared, ranks.QUERY, **options)
    assert scores.provenance["processes"] == 2
    close(scores.values, alone.values, 1e-7)
    task.grave = tmp_path / "grave"
    stored = method.attribute(shared, ranks.QUERY, out="scores", **options)
    assert int(task.grave.read_text()) != os.getpid()
    assert stored.provenance["processes"] in (1, 2)
    close(stored.values, alone.values, 1e-7)


def test_another_executor_is_refused(tmp_path: Path) -> None:
    ranks.record(tmp_path)
    with pytest.raises(whence.errors.InvalidInput, match="executor='slurm': use None"):
        whence.TracIn().attribute(ranks.study(tmp_path), ranks.QUERY, executor="slurm")
