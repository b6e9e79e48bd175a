"""Trainings spread over a Ray cluster: two local workers, one of which is killed on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import recipes
from torch import nn

from whence.retrain import Training, Truth, ground_truth, measure

ray = pytest.importorskip("ray")
QUERY = recipes.dataset(5, seed=9)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    tests = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


@pytest.mark.slow
def test_a_killed_worker_is_replaced(cluster: None, tmp_path: Path) -> None:
    driver, fallen = os.getpid(), tmp_path / "fallen"

    def model() -> nn.Module:
        if os.getpid() != driver and not fallen.exists():
            fallen.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return recipes.mlp()

    recipe = recipes.recipe(model=model)
    truth = ground_truth(
        recipe, QUERY, 0.5, 6, 2, out=tmp_path / "t", executor="ray", progress=False
    )
    assert int(fallen.read_text()) != driver
    assert truth.notes["at_once"] <= 6  # both workers have something to do
    alone = ground_truth(recipes.recipe(), QUERY, 0.5, 6, 2, progress=False)
    np.testing.assert_allclose(truth.measurements, alone.measurements, rtol=1e-10)
    assert np.array_equal(Truth.load(tmp_path / "t").measurements, truth.measurements)


def test_only_what_is_missing_is_made(cluster: None, tmp_path: Path) -> None:
    trainings = [Training(seed, np.arange(20)) for seed in range(4)]
    first = measure(recipes.recipe(), QUERY, trainings[:3], out=tmp_path, progress=False)
    parts = {f.name for f in (tmp_path / "parts").glob("*.safetensors")}
    whole = measure(
        recipes.recipe(), QUERY, trainings, out=tmp_path, executor="ray", progress=False
    )
    assert np.array_equal(whole[:3], first)
    assert len({f.name for f in (tmp_path / "parts").glob("*.safetensors")} - parts) == 1


def test_an_error_in_a_worker_is_the_callers(cluster: None) -> None:
    driver = os.getpid()

    def model() -> nn.Module:
        if os.getpid() != driver:
            raise ValueError("no such weights on this machine")
        return recipes.mlp()

    with pytest.raises(Exception, match="no such weights on this machine"):
        measure(recipes.recipe(model=model), QUERY, [Training(0)], executor="ray", progress=False)
