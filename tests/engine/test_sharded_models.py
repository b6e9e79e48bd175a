"""A model that FSDP2 divides among processes: recorded, attributed, and left as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import ranks, sharded
from support.comparing import close

import whence
from whence.engine.queries import Queries


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_weights_are_there_while_a_unit_runs(group: None, tmp_path: Path) -> None:
    """And only then; the scores are those of a whole model, to the last bit."""
    model = sharded.train(tmp_path / "run", sharded.shard(sharded.net(), 1), 0, 1)
    before = sharded.fingerprint(model)
    study = sharded.study(model, tmp_path / "run", tmp_path / "1")
    assert all(p.is_meta for p in study.model.parameters())
    run = study.runs[0]
    passes = study.passes(run, device=study.device, dtype=torch.float64)["train"]
    first, second = passes.model.h
    present: list[list[bool]] = []

    def note(*_: object) -> None:
        layers = (passes.model.wte, first.c_out, second.c_out)
        present.append([bool(layer.weight.isfinite().all()) for layer in layers])

    handle = second.ln_1.register_forward_hook(note)
    passes.load(run.final)
    passes.task.outputs(passes.model, study.data["train"].take([0, 1]))
    handle.remove()
    assert present == [[True, False, True]]  # the root's, not the first block's
    scores = whence.TracIn().attribute(study, sharded.QUERY, **sharded.EXACT)
    whole = sharded.study(sharded.net(), tmp_path / "run", tmp_path / "2")
    expected = whence.TracIn().attribute(whole, sharded.QUERY, **sharded.EXACT)
    np.testing.assert_array_equal(scores.values, expected.values)
    assert scores.provenance == expected.provenance
    assert sharded.fingerprint(model) == before


@pytest.mark.parametrize("query", [sharded.QUERY, None], ids=["low rank", "self"])
def test_layers_take_turns(
    query: Any, group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sharded model with little memory, and not of a whole one with much."""
    model, by_group = sharded.train(tmp_path, sharded.shard(sharded.net(), 1), 0, 1), []

    def noted(self: Queries, groups: Any) -> Any:
        by_group.append(len(groups))
        return divided(self, groups)

    divided, values = Queries.by_group, []
    monkeypatch.setattr(Queries, "by_group", noted)
    for its, memory in ((model, 2**12), (sharded.net(), 2**30)):
        monkeypatch.setattr("whence.engine.workspace.allowance", lambda *_, size=memory: size)
        study = sharded.study(its, tmp_path, tmp_path / str(memory))
        how: dict[str, Any] = {} if query is None else {"query_rank": 1}
        values.append(whence.Source(2).attribute(study, query, **how, **sharded.EXACT).values)
    close(*values, 1e-9)
    assert by_group[0] > 1 == by_group[-1]


def test_other_shards_are_refused_by_name(group: None, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    sharded.train(tmp_path / "run", sharded.net(), 0, 1)
    model = sharded.net()
    plan = {"h.0.c_out": ColwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
    with pytest.raises(
        whence.errors.InvalidInput, match=r"h\.0\.c_out\.weight .*tensor parallelism"
    ):
        sharded.study(model, tmp_path / "run", tmp_path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    ranks.together(folder, "from support import sharded; sharded.everything(folder, rank)")
    return folder


@pytest.fixture(scope="module")
def whole(pair: Path) -> dict[str, torch.Tensor]:
    """The weights of the sharded model at the end of training."""
    weights: dict[str, torch.Tensor] = torch.load(pair / "whole.pt", weights_only=True)
    return weights


@pytest.mark.slow
def test_a_recorded_run_has_whole_weights(pair: Path, whole: dict[str, torch.Tensor]) -> None:
    """Opened in a process without a group; and they are those of a training in one process."""
    run = whence.Run.open(pair / "run")
    final = run.final.weights()
    assert final.keys() == whole.keys()
    assert all(torch.equal(final[name], tensor) for name, tensor in whole.items())
    sharded.alone(pair)
    same = whence.Run.open(pair / "alone")
    assert [c.step for c in run.checkpoints] == [c.step for c in same.checkpoints] == [2, 3, 4]
    assert [c.step for c in run.trajectory] == list(range(5))
    assert run.final.files.aliases == same.final.files.aliases != {}
    for ours, theirs in zip(run.checkpoints, same.checkpoints, strict=True):
        for mine, other in (
            (ours.weights(), theirs.weights()),
            (ours.second_moments(), theirs.second_moments()),
            (ours.optimizer_state(), theirs.optimizer_state()),
        ):
            assert mine is not None and other is not None and mine.keys() == other.keys()
            for name in mine:
                close(mine[name].numpy(), other[name].numpy(), 1e-6)


@pytest.mark.slow
def test_one_process_restores_what_two_have_recorded(
    pair: Path, whole: dict[str, torch.Tensor]
) -> None:
    model = sharded.net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    recorder = whence.Recorder(pair / "run", model, optimizer, checkpoints=[4])
    assert recorder.restore() == sharded.STEPS
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in whole.items())
    state = whence.Run.open(pair / "run").final.optimizer_state()
    assert state is not None
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], state[f"{name}/exp_avg"])


@pytest.mark.slow
@pytest.mark.parametrize("name", sharded.METHODS)
def test_a_sharded_model_has_the_scores_of_the_whole_one(
    name: str, pair: Path, tmp_path: Path
) -> None:
    first, second = (np.load(pair / f"{name}-{rank}.npy") for rank in (0, 1))
    np.testing.assert_array_equal(first, second)
    study = sharded.study(sharded.net(), pair / "run", tmp_path)
    scores = sharded.METHODS[name]().attribute(study, sharded.QUERY, **sharded.EXACT)
    close(first, scores.values, 1e-7)


def known(pair: Path, what: str) -> list[object]:
    return [json.loads((pair / f"{rank}.json").read_text())[what] for rank in (0, 1)]


@pytest.mark.slow
def test_model_and_shards_are_left_as_they_were(pair: Path) -> None:
    assert known(pair, "unchanged") == [True, True]


@pytest.mark.slow
def test_a_sharded_training_resumes_with_the_same_bits(pair: Path) -> None:
    assert known(pair, "resumed") == [True, True]


@pytest.mark.slow
def test_a_write_that_fails_ends_all_ranks(pair: Path) -> None:
    first, second = known(pair, "failure")
    assert first == "DiskFull: the disk is full"
    assert second == "RankFailed: rank 0 could not record the run: the disk is full"
