"""Calculations that several processes share, and a way to run them: `python ranks.py` is a rank."""

from __future__ import annotations

import copy
import errno
import json
import os
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import whence
from support import dense, models
from support.memory import LiveBytes
from whence.engine import query_factors
from whence.layers.passes import Passes
from whence.operators.fit import Fitter
from whence.world import World

TASK = whence.Classification()
TRAIN, QUERY = models.vectors(23), models.vectors(5, seed=1)
DOCUMENTS, PROMPTS = models.documents(7), models.documents(3, seed=1)
EXACT: dict[str, Any] = {"dtype": torch.float64, "progress": False, "batch_size": 4}


def net() -> nn.Module:
    torch.manual_seed(0)
    return models.mlp((4, 6, 5, 3), inplace=False).double()


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return models.Transformer().double()


def record(folder: Path) -> None:
    """The runs that the cases are about."""
    optimizers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
        "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    }
    for name, optimizer_of in optimizers.items():
        model = net()
        optimizer = optimizer_of(model.parameters())
        order = np.random.default_rng(0)
        with whence.Recorder(
            folder / name, model, optimizer, checkpoints=3, total_steps=9
        ) as recorder:
            for _ in range(9):
                indices = order.choice(len(TRAIN), 8, replace=False)
                x, y = TRAIN[torch.from_numpy(indices)]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                recorder.step(indices)
                optimizer.step()
    language = whence.LanguageModeling()
    models.train_run(gpt(), language, DOCUMENTS, [2, 4], 0.1).run.save(folder / "gpt")
    record_deep(folder)


NARROW, DEPTH, WORDS = 40, 14, 11  # of `Deep`
DEEP = {"deep sgd": (torch.optim.SGD, 0.05), "deep adamw": (torch.optim.AdamW, 1e-3)}
SEQUENCES = models.documents(3, 3, WORDS, seed=1)


class Deep(nn.Module):
    """A language model of many layers, so that a vector of one takes far less than one of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, NARROW)
        self.layers = nn.ModuleList(nn.Linear(NARROW, NARROW) for _ in range(DEPTH))
        self.head = nn.Linear(NARROW, WORDS)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        logits: torch.Tensor = self.head(x)
        return logits


def record_deep(folder: Path) -> None:
    """Runs of `Deep` with SGD and AdamW."""
    data = models.documents(12, 3, WORDS)
    task = whence.LanguageModeling()
    for name, (kind, rate) in DEEP.items():
        model = Deep().double()
        optimizer: Any = kind(model.parameters(), lr=rate)
        how = {"checkpoints": 3, "total_steps": 6}
        with whence.Recorder(folder / name, model, optimizer, **how) as recorder:
            for _ in range(6):
                batch = dense.batch_of(data)
                optimizer.zero_grad()
                task.losses(task.outputs(model, batch), batch).mean().backward()
                recorder.step(np.arange(12))
                optimizer.step()


def deep(folder: Path, name: str = "deep sgd", **changes: Any) -> whence.Study:
    data, changes = models.documents(12, 3, WORDS), {"layers": "all", **changes}
    task = whence.LanguageModeling()
    return whence.Study(Deep().double(), task, data, folder / name, **changes)


def study(folder: Path, name: str = "sgd", **changes: Any) -> whence.Study:
    if name in DEEP:
        return deep(folder, name, **changes)
    if name == "gpt":
        return whence.Study(gpt(), whence.LanguageModeling(), DOCUMENTS, folder / name, **changes)
    return whence.Study(net(), TASK, TRAIN, folder / name, **changes)


Case = Callable[[Path, Path], Any]  # of the recorded runs, and a folder of its own


def scored(method: Any, run: str = "sgd", query: Any = QUERY, **options: Any) -> Case:
    def case(runs: Path, own: Path) -> Any:
        given = {name: own / "scores" if name == "out" else x for name, x in options.items()}
        cache = {} if run == "sgd" else {"cache": own / "cache"}
        call = {**EXACT, **given}
        if isinstance(method, whence.Random):
            del call["batch_size"]
        return method.attribute(study(runs, run, **cache), query, **call)

    return case


def every_layer(runs: Path, own: Path) -> Any:
    given = study(runs, "gpt", layers="all", cache=own / "cache")
    return whence.Source(segments=2).attribute(given, PROMPTS, **EXACT)


def several_runs(runs: Path, own: Path) -> Any:
    both = whence.Study(net(), TASK, TRAIN, [runs / "sgd", runs / "adam"], cache=own / "cache")
    return whence.Trak(6).attribute(both, QUERY, out=own / "scores", **EXACT)


def tokens(runs: Path, own: Path) -> Any:
    rows = whence.Source().tokens(
        study(runs, "gpt"), PROMPTS, [4, 0, 2], dtype=torch.float64, progress=False
    )
    return np.concatenate([np.concatenate([r.values, r.rest[:, None]], 1) for r in rows], 1)


def stored(projection: str, fisher: str) -> Case:
    def case(runs: Path, own: Path) -> Any:
        how = {"dimension": 6, "projection": projection, "fisher": fisher}
        given = study(runs, cache=own / "cache")
        whence.GradientStore.build(given, own / "store", **how, **EXACT)
        store = whence.GradientStore.open(own / "store", given)
        options = {"progress": False, "batch_size": 4}
        parts = [
            store.source(QUERY, 2, **options),
            store.influence(QUERY, out=own / "s", **options),
        ]
        parts += [store.trak(QUERY, **options), store.tracin(QUERY, **options)]
        return np.stack([part.values for part in parts])

    return case


def room_for_all(runs: Path, own: Path) -> Any:
    """As on a GPU that has room for the factors of all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whence.engine.workspace.FACTOR_SHARE", {"cpu": 0.5})
        return scored(whence.Source(segments=2), "gpt", PROMPTS)(runs, own)


def room_for_few(runs: Path, own: Path) -> Any:
    """As on a GPU that has no room for the factors of two layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whence.engine.workspace.FACTOR_SHARE", {"cpu": 1e-8})
        return scored(whence.Source(segments=2), "gpt", PROMPTS)(runs, own)


def in_turns(method: Any, run: str = "deep sgd", query: Any = SEQUENCES, **options: Any) -> Case:
    """With memory for the query vectors of a few layers; factors at their owners."""

    def case(runs: Path, own: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("whence.engine.workspace.FACTOR_SHARE", {"cpu": 0.1})
            return scored(method, run, query, memory=2**20, **options)(runs, own)

    return case


CASES: dict[str, Case] = {
    "source": scored(whence.Source(segments=2)),
    "source to a folder": scored(whence.Source(segments=2), out=True, by_segment=True),
    "source of a language model": scored(whence.Source(segments=2), "gpt", PROMPTS),
    "source, room for all factors": room_for_all,
    "source, room for few factors": room_for_few,
    "source, few queries at a time": scored(whence.Source(segments=3), memory=2**20),
    "source of adam": scored(whence.Source(), "adam"),
    "published source of adam": scored(whence.Source.published(), "adam"),
    "source, gauss-newton": scored(whence.Source(curvature="gauss-newton")),
    "source of sums of queries": scored(whence.Source(segments=2), query_weights=np.eye(3, 5) + 1),
    "source of low rank": scored(whence.Source(segments=2), query_rank=2, out=True),
    "source of low rank, few at a time": scored(
        whence.Source(segments=2), query_rank=1, memory=2**20
    ),
    "influence of low rank": scored(whence.Influence(), "gpt", PROMPTS, query_rank=2),
    "source, layers in turns": in_turns(whence.Source(segments=2), query_rank=3),
    "source of adamw, layers in turns": in_turns(
        whence.Source(segments=2), "deep adamw", query_rank=3, query_weights=np.eye(2, 3) + 1
    ),
    "influence, layers in turns, whole vectors": in_turns(whence.Influence()),
    "tracin, layers in turns": in_turns(whence.TracIn(), query_rank=3),
    "self-influence, layers in turns": in_turns(whence.Source(segments=2), query=None),
    "source by layer": scored(whence.Source(segments=2), by_layer=True),
    "source, k-fac, exact": scored(whence.Source(curvature="kfac", fisher="exact")),
    "source, diagonal": scored(whence.Source(curvature="diagonal", fisher="empirical")),
    "fastsource": scored(whence.FastSource()),
    "best": scored(whence.Best()),
    "best of adam": scored(whence.Best(), "adam"),
    "influence": scored(whence.Influence(), top=3),
    "influence to a folder": scored(whence.Influence(), top=3, out=True),
    "influence, cg": scored(whence.Influence(1e-2, solver="cg")),
    "influence, arnoldi": scored(whence.Influence(solver="arnoldi", rank=5, iterations=20)),
    "influence, datainf": scored(whence.Influence(solver="datainf")),
    "tracin": scored(whence.TracIn(), by_segment=True),
    "tracin of a language model": scored(whence.TracIn(), "gpt", PROMPTS),
    "trak": scored(whence.Trak(6)),
    "trak of two runs": several_runs,
    "gradient cosine": scored(whence.GradientCosine()),
    "gradient norm": scored(whence.GradientNorm()),
    "less": scored(whence.LESS(6)),
    "trackstar": scored(whence.TrackStar(6)),
    "repsim": scored(whence.RepSim(), out=True),
    "random": scored(whence.Random(), out=True),
    "self-influence": scored(whence.Source(segments=2), query=None),
    "self-influence to a folder": scored(whence.Source(), query=None, out=True),
    "self-influence, cg": scored(whence.Influence(1e-2, solver="cg"), query=None),
    "self-influence, tracin": scored(whence.TracIn(), query=None),
    "self-influence, repsim": scored(whence.RepSim(), query=None),
    "hydra": scored(whence.Hydra(), out=True),
    "unrolled": scored(whence.Unrolled()),
    "unrolled, self-influence": scored(whence.Unrolled(), query=None),
    "tokens": tokens,
    "every layer of a language model": every_layer,
    "store": stored("random", "empirical"),
    "store in the eigenbasis": stored("eigenbasis", "sampled"),
}


def values(answer: Any) -> np.ndarray:
    """The numbers of an answer."""
    if isinstance(answer, np.ndarray):
        return answer
    if answer.strongest is not None:
        return np.concatenate([answer.strongest.values, answer.strongest.columns], -1)
    return np.array(answer.values)


def start(
    folder: Path, body: str, size: int = 2, **environment: str
) -> list[subprocess.Popen[str]]:
    """Processes of one group, that run the same code with `rank`, `folder` and `ranks`."""
    known = {"PYTHONPATH": os.pathsep.join(sys.path), "WORLD_SIZE": str(size)}
    program = PROLOGUE.format(folder=str(folder), size=size) + body + EPILOGUE
    return [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **known, "RANK": str(rank), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def outcome(processes: Iterable[subprocess.Popen[str]], timeout: float = 240) -> list[str]:
    """What each process wrote to stderr; they must end by themselves."""
    try:
        return [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()


def together(folder: Path, body: str, size: int = 2, **environment: str) -> None:
    """The same code in all processes, which must succeed."""
    processes = start(folder, body, size, **environment)
    errors = outcome(processes)
    assert not any(process.returncode for process in processes), "\n".join(errors)


PROLOGUE = """
import os, sys, warnings
from datetime import timedelta
from pathlib import Path
import numpy as np, torch, torch.distributed as dist
torch.set_num_threads(1)
import whence
from support import ranks
rank, folder = int(os.environ["RANK"]), Path({folder!r})
dist.init_process_group(
    "gloo", init_method=f"file://{{folder}}/meeting", rank=rank, world_size={size},
    timeout=timedelta(seconds=60),
)
"""
# The group's threads must end before Python does: one that needs the interpreter then aborts.
EPILOGUE = """
import weakref
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
if group() is not None:
    sys.exit("something still refers to the process group")
"""


def every_case(runs: Path, folder: Path, rank: int) -> None:
    """The numbers of all cases, or the error of one, to files."""
    for name, case in CASES.items():
        own = folder / name.replace(" ", "-")
        own.mkdir(exist_ok=True, parents=True)
        try:
            np.save(own / f"rank-{rank}.npy", values(case(runs, own)))
        except Exception:
            (own / f"rank-{rank}.txt").write_text(traceback.format_exc())


def shares(runs: Path, folder: Path, rank: int) -> dict[str, int]:
    """How many examples and queries this rank takes through the model, and its bytes of factors."""
    taken: Counter[str] = Counter()
    backward, placed = Passes.backward_passes, Fitter._placed

    def counting(self: Any, data: Any, blocks: Any, signal: Any, *rest: Any, **more: Any) -> Any:
        taken[f"{data.name} {signal.name}"] += sum(map(len, blocks))
        return backward(self, data, blocks, signal, *rest, **more)

    def weighing(self: Any, kind: Any, factors: Any) -> Any:
        taken["factors"] += sum(x.nbytes for x in factors.values())
        return placed(self, kind, factors)

    try:
        Passes.backward_passes, Fitter._placed = counting, weighing  # type: ignore
        fresh = study(runs, cache=folder / "shares")
        whence.Source().attribute(fresh, QUERY, **EXACT)
    finally:
        Passes.backward_passes, Fitter._placed = backward, placed  # type: ignore
    return dict(taken)


def failing(runs: Path, folder: Path, rank: int) -> str:
    """The error of each rank if rank 1 fails; the next call succeeds."""
    backward, message = Passes.backward_passes, ""

    def fail(*_: Any, **__: Any) -> Any:
        raise whence.errors.InvalidInput("example 7 is bad")

    fresh = study(runs, cache=folder / "failing")
    try:
        if rank == 1:
            Passes.backward_passes = fail  # type: ignore
        whence.Source().attribute(fresh, QUERY, **EXACT)
    except whence.WhenceError as error:
        message = str(error)
    finally:
        Passes.backward_passes = backward  # type: ignore
    whence.Source().attribute(fresh, QUERY, **EXACT)
    return message


def full_disk(runs: Path, folder: Path, rank: int) -> list[Any]:
    """The error of each rank if the disk of rank 1 is full, and the scores of the same call."""
    sync, out = os.fsync, folder / "full"

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def scores() -> Any:
        fresh = study(runs, cache=folder / "full-cache")
        return whence.Source(segments=2).attribute(fresh, QUERY, out=out, **EXACT)

    try:
        os.fsync = full if rank == 1 else sync
        scores()
        message = ""
    except whence.WhenceError as error:
        message = str(error)
    finally:
        os.fsync = sync
    return [message, scores().values.tolist()]


class Mortal(whence.Classification):
    """Kills rank 1 once, in the middle of its work."""

    grave: Path | None = None

    def losses(self, outputs: Any, batch: Any) -> Any:
        second = dist.is_initialized() and dist.get_rank() == 1
        if second and self.grave is not None and not self.grave.exists():
            self.grave.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().losses(outputs, batch)


#: what rank 1 has different, by what an error calls it
DIFFERENT = {
    "the training data": "study.data['train'].dataset.tensors[0][3] += rank",
    "the queries": "query = torch.utils.data.Subset(query, range(5 - rank))",
    "the method": "method = whence.Source(damping=float(rank))",
    "dtype": "options['dtype'] = [torch.float32, torch.float64][rank]",
    "the task": "study.tasks['train'].measurement = 'loss' if rank else 'margin'",
    "the model or its code": "study.models['train'][1] = [nn.ReLU(), nn.GELU()][rank]",
    "the runs": "study.runs[0] = whence.Run.open(runs / ['sgd', 'adam'][rank])",
    "batch_size": "options['batch_size'] = 2 + rank",
    "out": "options['out'] = folder / f'{rank}'",
    "top": "options['top'] = 2 + rank",
    "query_rank": "options['query_rank'] = [None, 2][rank]",
    "by_layer": "options['by_layer'] = bool(rank)",
}


def differing(runs: Path, folder: Path, rank: int) -> dict[str, str]:
    """The error for each difference."""
    messages = {}
    for name, change in DIFFERENT.items():
        given = whence.Study(net(), copy.copy(TASK), copy.deepcopy(TRAIN), runs / "sgd")
        local: dict[str, Any] = {"study": given, "query": QUERY, "method": whence.Source()}
        local |= {"rank": rank, "options": dict(EXACT), "runs": runs, "folder": folder}
        exec(change, globals(), local)
        try:
            local["method"].attribute(local["study"], local["query"], **local["options"])
        except whence.errors.InvalidInput as error:
            messages[name] = str(error)
    return messages


def other_calls(runs: Path, folder: Path, rank: int) -> str:
    """The error where rank 0 attributes, and rank 1 builds a store."""
    given = study(runs, cache=folder / "other")
    try:
        if rank == 0:
            whence.TracIn().attribute(given, QUERY, **EXACT)
        else:
            whence.GradientStore.build(given, folder / "other-store", 6, **EXACT)
    except whence.errors.RankFailed as error:
        return str(error)
    return ""


SIDE = 64  # of the layers of `wide`


def wide(**changes: Any) -> whence.Study:
    """A study of twelve layers of one size."""
    torch.manual_seed(0)
    model = models.mlp((SIDE,) * 13 + (3,), inplace=False).double()
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(30, SIDE, generator=draw, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(inputs, torch.randint(3, (30,), generator=draw))
    run = models.train_run(model, TASK, data, [2, 4], 0.1).run
    return whence.Study(model, TASK, data, run, **changes)


def factor_bytes(folder: Path) -> dict[str, float]:
    """The most that fitting holds at once, and what it leaves: with the cache in memory, with one
    on disk, and read from it. The sums of scores."""
    fit, taken = Fitter.fit, {}

    def weighing(self: Any, kind: Any, checkpoints: Any, diagonal: bool) -> Any:
        self.passes.load(checkpoints[0])
        with LiveBytes(8 * SIDE**2) as live:
            factors = fit(self, kind, checkpoints, diagonal)
        taken[name], taken[f"{name}, left"] = live.peak, live.alive
        return factors

    for name, cache in {"memory": None, "disk": folder, "read": folder}.items():
        fresh = wide(**({} if cache is None else {"cache": cache}))
        query = torch.utils.data.Subset(fresh.data["train"].dataset, [0])
        try:
            Fitter.fit = weighing  # type: ignore
            scores = whence.Influence().attribute(fresh, query, **EXACT)
        finally:
            Fitter.fit = fit  # type: ignore
        taken[f"{name}, scores"] = float(np.abs(scores.values).sum())
    return taken


def resumed(runs: Path, folder: Path, rank: int) -> list[Any]:
    """Scores; of a call that rank 1 fails in the middle of a pass, and the same call again, the
    error, the scores, and the examples that it took."""
    batch, taken, fails = Passes._batch, [0], [False]

    def counting(self: Any, data: Any, indices: Any, *given: Any) -> Any:
        taken[0] += len(indices)
        if fails[0] and taken[0] > 30:
            raise whence.errors.InvalidInput("a bad example")
        return batch(self, data, indices, *given)

    def scores(name: str) -> Any:
        taken[0] = 0
        fresh = study(runs, cache=folder / name)
        answer = whence.Source(segments=1).attribute(fresh, QUERY, **EXACT)
        return answer.values.tolist()

    message = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whence.operators.fit.POSITIONS", 1)  # so that a pass has several batches
        patch.setattr("whence.persist.cache.SNAPSHOT_SECONDS", 0.0)
        patch.setattr(Passes, "_batch", counting)
        whole, all_examples = scores("not-failing"), taken[0]
        fails[0] = rank == 1
        try:
            scores("failing-once")
        except whence.WhenceError as error:
            message = str(error)
        fails[0] = False
        again = scores("failing-once")
    return [whole, again, message, all_examples, taken[0]]


def factors(runs: Path, folder: Path, rank: int) -> dict[str, float]:
    return factor_bytes(folder / "wide")


def cut_vectors(runs: Path, folder: Path, rank: int) -> dict[str, int]:
    """Of how many queries this rank cuts a block's vectors; the most numbers of a query that it
    sends at once afterwards, and those of its whole vector."""
    cut, regather, taken = query_factors.leading, World.regather, {"sent": 0, "whole": 0}

    def counting(values: Any, rank: int) -> Any:
        taken["rows"], taken["whole"] = len(values), max(taken["whole"], values[0].numel())
        return cut(values, rank)

    def weighing(self: Any, rows: Any, count: int) -> Any:
        taken["sent"] = max(taken["sent"], rows[0].numel())
        return regather(self, rows, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_factors, "leading", counting)
        patch.setattr(World, "regather", weighing)
        fresh = study(runs, cache=folder / "cut")
        whence.Influence().attribute(fresh, QUERY, query_rank=1, **EXACT)
    return taken


FACTS = (shares, cut_vectors, failing, full_disk, differing, other_calls, factors, resumed)


def everything(runs: Path, folder: Path, rank: int) -> None:
    """All cases, and what else is known of two processes."""
    every_case(runs, folder, rank)
    known = {f.__name__: f(runs, folder, rank) for f in FACTS}
    (folder / f"{rank}.json").write_text(json.dumps(known))
