"""The kinds of attempts. See `whence`'s docs/trust.md for what each must not break."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import resource
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import dense, models
from torch import Tensor, nn

import whence
from faults import jobs
from faults.children import Broken, Child, Ended, killed_at_write, run
from faults.jobs import JOBS, expected
from whence.cli import main
from whence.retrain import Truth
from whence.scores import Scores

Rng = random.Random
SHARED_RUN = ("SOURCE", "top scores of TracIn", "TRAK", "store")  # several processes read one run


# --- kills, full disks, several processes ---------------------------------------------------------


def chosen(rng: Rng, folder: Path) -> tuple[str, str, Callable[[Path], str], Path]:
    """A job: its name, its result, the job itself, and a new folder for it."""
    name, here = rng.choice(list(JOBS)), folder / "job"
    here.mkdir()
    return name, expected(name, folder), JOBS[name], here


_DURATIONS: dict[str, float] = {}


def duration(name: str, folder: Path) -> float:
    """How long a job takes, measured once."""
    if name not in _DURATIONS:
        start = time.monotonic()
        run(lambda: JOBS[name](folder / "timed"))
        _DURATIONS[name] = time.monotonic() - start
    return _DURATIONS[name]


def kill(rng: Rng, folder: Path) -> None:
    """SIGKILL one to three times, anywhere; then the same call gives the same bits."""
    name, wanted, job, here = chosen(rng, folder)
    usual = duration(name, folder)
    kills, wanted_kills = 0, rng.randint(1, 3)
    for _ in range(9):  # a job may end before its signal arrives
        if kills == wanted_kills:
            break
        if rng.random() < 0.6:
            ended = Child(killed_at_write(lambda: job(here), rng)).end()
        else:
            child = Child(lambda: job(here))
            time.sleep(rng.random() * usual)
            child.kill()
            ended = child.end()
        kills += ended.signal != 0
        if not ended.signal and not ended.fine:
            raise Broken(f"{name}, resumed after SIGKILL: {ended}")
        if ended.fine and not kills:  # too late: once more, from the start
            shutil.rmtree(here)
            here.mkdir()
    same(run(lambda: job(here)), wanted, f"{name}, resumed after SIGKILL")


def full_disk(rng: Rng, folder: Path) -> None:
    """No room left, at a random moment: a clear error. With room again, the same bits."""
    name, wanted, job, here = chosen(rng, folder)
    how = rng.choice(["disk", "disk", "limit", "sync"] if may_mount() else ["limit", "sync"])

    def limited() -> str:
        if how == "limit":
            size = int(2 ** rng.uniform(5, 14))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        elif how == "sync":
            left, real = [rng.randint(1, 40)], os.fsync

            def fsync(descriptor: int) -> None:
                left[0] -= 1
                if left[0] <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                real(descriptor)

            os.fsync = fsync
        return job(here)

    with small_disk(here, rng) if how == "disk" else nullcontext(lambda: None) as enlarge:
        ended = run(limited)
        if not ended.fine and not (ended.refused and "DiskFull" in ended.error):
            raise Broken(f"{name} on a full disk ({how}): {ended}")
        enlarge()
        same(run(lambda: job(here)), wanted, f"{name}, resumed after a full disk ({how})")


@cache
def may_mount() -> bool:
    """Whether this process may make a disk of its own, which can be really full."""
    with tempfile.TemporaryDirectory() as place:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place]
        try:
            if subprocess.run(command, capture_output=True, check=False).returncode:
                return False
        except OSError:
            return False
        subprocess.run(["umount", place], check=True)
        return True


@contextmanager
def small_disk(place: Path, rng: Rng) -> Iterator[Callable[[], None]]:
    """A disk of a few pages in memory; yields what makes it large."""
    size = 4096 * int(2 ** rng.uniform(1, 6.5))
    mount = ["mount", "-t", "tmpfs", "-o"]
    subprocess.run([*mount, f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield lambda: _remount(place)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _remount(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)


def several_processes(rng: Rng, folder: Path) -> None:
    """Two to four processes do the same job at once: each is right, or is refused."""
    name, wanted, job, here = chosen(rng, folder)
    if name in SHARED_RUN:
        jobs.study(here)
    children = []
    for _ in range(rng.randint(2, 4)):
        children.append(Child(lambda: job(here)))
        time.sleep(rng.random() * 0.2)
    ends = [child.end() for child in children]
    for ended in ends:
        if ended.fine and ended.value != wanted:
            raise Broken(f"{name} beside others: another result")
        if not ended.fine and not (ended.refused and "FolderConflict" in ended.error):
            raise Broken(f"{name} beside others: {ended}")
    if not any(ended.fine for ended in ends):
        raise Broken(f"{name}: all processes were refused: {ends}")
    same(run(lambda: job(here)), wanted, f"{name}, after several processes")


def same(ended: Ended, wanted: str, what: str) -> None:
    if not ended.fine:
        raise Broken(f"{what}: {ended}")
    if ended.value != wanted:
        raise Broken(f"{what}: other bits")


# --- damaged and hostile files --------------------------------------------------------------------


def write_everything(folder: Path) -> None:
    """A folder of every kind, finished and unfinished."""
    for name, job in JOBS.items():
        job(folder / name)
    scores = Scores.load(folder / "SOURCE" / "scores")
    scores.save(folder / "saved")
    Truth.load(folder / "ground truth" / "truth").save(folder / "truth")
    interrupted = folder / "interrupted"
    jobs.study(interrupted)
    run(lambda: _interrupt(lambda: jobs.source(interrupted), whence.scores.ScoreWriter, "finish"))
    unbuilt = folder / "unbuilt"
    jobs.study(unbuilt)
    run(lambda: _interrupt(lambda: jobs.store(unbuilt), whence.store.rows.Rows, "finish"))


def _interrupt(function: Callable[[], str], owner: Any, name: str) -> str:
    setattr(owner, name, lambda *_, **__: os._exit(0))
    return function()


READERS: dict[str, Callable[[Path], str]] = {
    **{name: (lambda folder, n=name: JOBS[n](folder / n)) for name in JOBS},
    "saved": lambda folder: jobs.of_scores(Scores.load(folder / "saved")),
    "truth": lambda folder: jobs.of_truth(Truth.load(folder / "truth")),
    "interrupted": lambda folder: jobs.source(folder / "interrupted"),
    "unbuilt": lambda folder: jobs.store(folder / "unbuilt"),
}
_TEMPLATE: list[Path] = []
_READ: dict[str, str] = {}


def template() -> Path:
    """The folder with everything, written once."""
    if not _TEMPLATE:
        _TEMPLATE.append(Path(tempfile.mkdtemp(prefix="whence-faults-")))
        ended = run(lambda: str(write_everything(_TEMPLATE[0])))
        if not ended.fine:
            raise Broken(f"writing everything: {ended}")
        for name, reader in READERS.items():
            copied = Path(tempfile.mkdtemp(prefix="whence-faults-")) / "all"
            shutil.copytree(_TEMPLATE[0], copied)
            ended = run(lambda reader=reader, copied=copied: reader(copied))
            if not ended.fine:
                raise Broken(f"reading {name}: {ended}")
            _READ[name] = ended.value
            shutil.rmtree(copied.parent)
    return _TEMPLATE[0]


def damaged_copy(rng: Rng, folder: Path) -> tuple[str, Path]:
    """A copy of one kind of folder, and a file in it."""
    name = rng.choice(list(READERS))
    shutil.copytree(template() / name, folder / name)
    files = sorted(f for f in (folder / name).rglob("*") if f.is_file() and f.suffix != ".lock")
    kind = rng.choice(sorted({f.suffix for f in files}))
    return name, rng.choice([f for f in files if f.suffix == kind])


def byte_flip(rng: Rng, folder: Path) -> None:
    """A flipped bit, a lost end or a zeroed sector: the same answer, or an error of whence."""
    name, file = damaged_copy(rng, folder)
    data = bytearray(file.read_bytes())
    if not data:
        return
    how = rng.choice(["flip"] * 8 + ["cut", "zeros"])
    if how == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del data[rng.randrange(len(data)) :]
    else:
        start = rng.randrange(len(data))
        data[start : start + 512] = bytes(len(data[start : start + 512]))
    file.write_bytes(data)
    what = f"{how} in {file.relative_to(folder)}"
    ended = run(lambda: READERS[name](folder))
    if ended.fine and ended.value != _READ[name]:
        raise Broken(f"{what}: another answer")
    if not ended.fine and not ended.refused:
        raise Broken(f"{what}: {ended}")


def npy(descr: str, shape: str, data: bytes = b"") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


VALUES: list[Any] = [math.nan, math.inf, -math.inf, -1, 10**30, -(10**30), 2**63, 0.5, True, None]
VALUES += ["", "\ud800", "\x1b[31m", "../../x", "[/bold]", "a" * 10**5, [], {}, [[[]]], [None] * 9]
FILES: list[bytes] = [b"", b"{}", b"[]", b"null", b"\x00" * 64, b"PK\x03\x04" + bytes(99)]
FILES += [b"[" * 10**6, b'{"a":' * 10**5, b"9" * 10**5, b"NaN", b"\x80\x04N.", b"\xff\xfe"]
FILES += [npy("'<f8'", "(1099511627776, 64)"), npy("'<f8'", "(-1,)"), npy("'|O'", "(1,)", b"N.")]
FILES += [npy("'<f8'", "(99999999999999999999,)"), npy("'<c16'", "(1,)", bytes(16)), npy("'", "(")]
FILES += [struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 2) + b"{}"]


def hostile_file(rng: Rng, folder: Path) -> None:
    """A file that somebody made to harm: an error of whence, at once; never anything worse."""
    name, file = damaged_copy(rng, folder)
    what = file.relative_to(folder)
    if file.suffix == ".json" and rng.random() < 0.7:
        content = json.loads(file.read_text())
        content.pop("checksum", None)
        place, value = _replace_somewhere(rng, content), rng.choice(VALUES)
        place(value)
        file.write_text(json.dumps(content))
        messages = f"{value!r:.40} in {what}"
    elif rng.random() < 0.15:
        file.unlink()
        file.mkdir()
        messages = f"{what} is a folder"
    else:
        content = rng.choice(FILES)
        file.write_bytes(content)
        messages = f"{content[:30]!r} as {what}"

    def read() -> str:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**32, resource.RLIM_INFINITY))
        return READERS[name](folder)

    ended = run(read)
    if not ended.fine and not ended.refused:
        raise Broken(f"{messages}: {ended}")


def _replace_somewhere(rng: Rng, content: Any) -> Callable[[Any], None]:
    """Sets a random value inside nested lists and dicts."""
    while True:
        keys = list(content) if isinstance(content, dict) else range(len(content))
        key = rng.choice(keys)
        inner = content[key]
        if not (isinstance(inner, (dict, list)) and inner and rng.random() < 0.8):
            return lambda value, c=content, k=key: c.__setitem__(k, value)
        content = inner


def hostile_text(rng: Rng, folder: Path) -> None:
    """Names with anything in them: nothing reaches the terminal that it would obey."""
    kinds = ["\x00\x1f", "\x7f\x9f", "\ud800\udfff", "\u2028\u202e", "\u2066\u2069", " ~", "¡￿"]

    def text() -> str:
        ranges = [rng.choice(kinds) for _ in range(rng.randint(1, 12))]
        drawn = "".join(chr(rng.randint(ord(a), ord(b))) for a, b in ranges)
        # in JSON two halves of a pair, one after the other, are one character
        drawn = drawn.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return rng.choice([drawn, f"[/{drawn}]", f"${drawn}_$^", f"\x1b]0;{drawn}\x07", drawn])

    names = [text() for _ in range(4)]
    values = np.random.default_rng(rng.randrange(2**32)).standard_normal((2, 6))
    scores = Scores(
        values,
        method=names[0],
        measurement=names[1],
        unit=names[2],
        higher_is_better=True,
        stage=[names[3]] * 3 + [names[0]] * 3,
        settings={names[1]: names[2]},
    )

    def show() -> str:
        scores.save(folder / "s")
        loaded = Scores.load(folder / "s")
        if (loaded.method, loaded.stage) != (names[0], scores.stage):
            raise Broken(f"{names!r} came back as {loaded.method!r}, {loaded.stage}")
        loaded.report(folder / "a.html", title=names[0])
        (folder / "a.html").read_text("utf-8")
        printed = [repr(loaded), repr(loaded.helpful(0)), str(loaded.describe())]
        output, saved = os.open(folder / "out", os.O_CREAT | os.O_RDWR), os.dup(1)
        os.dup2(output, 1)
        try:
            for options in ([], ["--json"]):
                if main(["top", str(folder / "s"), "--query", "0", *options]):
                    raise Broken(f"whence top fails on {names!r}")
        finally:
            os.dup2(saved, 1)
        printed.append((folder / "out").read_text("utf-8"))
        obeyed = {c for c in "".join(printed) if not c.isprintable() and c not in "\n\t"}
        # what Unicode has not assigned is printed, and obeyed by nobody; nor are spaces and joiners
        obeyed = {c for c in obeyed if ord(c) < 0xA0 or 0x200B <= ord(c) < 0x2070}
        obeyed -= {"\u200c", "\u200d", "\u202f", "\u205f"}
        if obeyed:
            raise Broken(f"{names!r}: {obeyed!r} reach the terminal")
        return ""

    ended = run(show)
    if not ended.fine:
        raise Broken(f"{names!r}: {ended}")


# --- mathematics ----------------------------------------------------------------------------------


def close(found: Any, wanted: Any, what: str, tolerance: float = 1e-8) -> None:
    scale = float(np.abs(wanted).max()) or 1.0
    off = float(np.abs(np.asarray(found) - wanted).max()) / scale
    if not off < tolerance:
        raise Broken(f"{what}: off by {off:.1e}")


def network(rng: Rng) -> None:
    """A random network, by every curvature, against dense matrices in float64."""
    torch.manual_seed(rng.randrange(2**31))
    classes = rng.randint(2, 4)
    task: Any = whence.Classification(rng.choice(["margin", "loss", "log_prob"]))
    if rng.random() < 0.3:
        inputs: Any = models.images(8, classes), models.images(3, classes, seed=1)
        model: nn.Module = models.ConvNet(rng.random() < 0.7, classes)
    else:
        sizes = [4, *(rng.randint(2, 7) for _ in range(rng.randint(0, 3)))]
        if rng.random() < 0.3:
            outputs = rng.randint(1, 3)
            task = whence.Regression(rng.choice(["mse", "half_mse"]), "loss")
            inputs = (
                models.regression(9, outputs=outputs),
                models.regression(3, outputs=outputs, seed=1),
            )
        else:
            outputs = classes
            inputs = models.vectors(9, 4, classes), models.vectors(3, 4, classes, seed=1)
        model = models.mlp((*sizes, outputs), bias=rng.random() < 0.7)
    steps = sorted(rng.sample(range(1, 15), rng.randint(1, 4)))
    kind = {"momentum": rng.choice([0.0, 0.5]), "weight_decay": rng.choice([0.0, 0.05])}
    history = models.train_run(model, task, inputs[0], steps, rng.uniform(0.02, 0.3), **kind)
    oracle = dense.Dense(model, task, inputs[0], history, inputs[1])
    study = whence.Study(model, task, inputs[0], history.run, layers="matrices")  # as the oracle
    curvature = rng.choice(["ekfac", "kfac", "diagonal", "identity"])
    fisher, segments = rng.choice(["exact", "empirical"]), rng.randint(1, len(steps))
    options: dict[str, Any] = {"dtype": torch.float64, "progress": False}
    options["batch_size"] = rng.randint(1, 9)
    method = whence.Source.published(segments, curvature=curvature, fisher=fisher)
    what = f"{model}, {curvature}, {fisher}, {segments} segments at {steps}"
    actual = method.attribute(study, inputs[1], **options).values
    close(actual, oracle.source(segments, curvature, fisher).sum(0), f"SOURCE of {what}")
    actual = whence.TracIn().attribute(study, inputs[1], **options).values
    close(actual, oracle.tracin(), f"TracIn of {what}")


def random_network(rng: Rng, folder: Path) -> None:
    ended = run(lambda: str(network(rng)))
    if not ended.fine:
        raise Broken(ended.error or f"signal {ended.signal}")


def program(rng: Rng, folder: Path) -> None:
    """A random training program with a Recorder; SOURCE as the paper writes it, on flat vectors.

    The brute force knows only what the loop itself wrote down: its weights, and the rate of every
    update. H is the Gauss-Newton matrix of all parameters of a layer, from Jacobians.
    """
    torch.manual_seed(rng.randrange(2**31))
    n, classes = rng.randint(6, 14), rng.randint(2, 3)
    regression = rng.random() < 0.4
    x = torch.randn(n + 3, 4, dtype=torch.float64)
    y: Tensor = torch.randn(n + 3, 1, dtype=torch.float64)
    task: Any = whence.Regression("half_mse", "loss")
    if not regression:
        y, task = torch.randint(0, classes, (n + 3,)), whence.Classification("loss")
    outputs = 1 if regression else classes
    layers: list[nn.Module] = [nn.Linear(4, rng.randint(2, 5), bias=rng.random() < 0.7)]
    layers.append(rng.choice([nn.Tanh(), nn.ReLU(), nn.GELU()]))
    layers.append(nn.Linear(layers[0].out_features, outputs))  # type: ignore[arg-type]
    model = nn.Sequential(*(layers if rng.random() < 0.8 else [nn.Linear(4, outputs)])).double()
    kind = rng.choice([torch.optim.SGD] * 2 + [torch.optim.Adam, torch.optim.AdamW] * 2)
    kind = rng.choice([kind, kind, kind, torch.optim.RMSprop])
    settings: dict[str, Any] = {"weight_decay": rng.choice([0.0, 0.01])}
    momentum = 0.0
    if kind is torch.optim.SGD:
        momentum = settings["momentum"] = rng.choice([0.0, 0.0, 0.5, 0.9])
        if momentum:
            settings |= rng.choice([{}, {"nesterov": True}, {"dampening": 0.25}])
    else:
        settings["eps"] = rng.choice([1e-3, 1e-2])
        if kind is not torch.optim.RMSprop:
            settings["betas"] = rng.choice([(0.9, 0.999), (0.5, 0.9)])
    rate = rng.uniform(0.02, 0.2) * (1.0 if kind is torch.optim.SGD else 0.1)
    optimizer = kind(groups(rng, model, rate), lr=rate, **settings)
    total = rng.randint(4, 12)
    late = rng.choice([0, 0, rng.randint(1, total - 1)])  # until then, the first layer is frozen
    late = late if kind is torch.optim.SGD and len(model) > 1 else 0
    schedulers: list[Callable[[], Any]] = [
        lambda: None,
        lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
        lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total, cycle_momentum=False),
    ]
    scheduler = rng.choice(schedulers)()
    count = rng.randint(1, min(4, total))
    accumulate, batch = rng.choice([1, 1, 2]), rng.randint(1, n)
    style, clip = rng.choice(["zero_grad", "none", "closure"]), rng.random() < 0.3
    if accumulate > 1 or clip:
        style = "zero_grad"
    losses = nn.functional.mse_loss if regression else nn.functional.cross_entropy
    rates, weights, preconditioners = [], [], []

    def mean_loss(chosen: Tensor) -> Tensor:
        return losses(model(x[chosen]), y[chosen]) / (2 if regression else 1)

    recorder = whence.Recorder(
        folder / "run", model, optimizer, checkpoints=count, total_steps=total, size=n
    )
    with recorder:
        for _ in range(total):
            chosen = torch.randperm(n)[:batch]
            model[0].requires_grad_(len(rates) >= late)
            rates.append(rates_of(model, optimizer))
            if style == "closure":

                def closure(chosen: Tensor = chosen) -> float:
                    optimizer.zero_grad()
                    loss = mean_loss(chosen)
                    loss.backward()
                    return float(loss)

                optimizer.step(closure)
            else:
                optimizer.zero_grad(set_to_none=style == "none")
                for part in chosen.chunk(accumulate):
                    (mean_loss(part) / accumulate).backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
            if scheduler is not None:
                scheduler.step()
            weights.append({k: v.detach().clone() for k, v in model.state_dict().items()})
            preconditioners.append(preconditioner(model, optimizer))
    run_ = whence.Run.open(folder / "run")
    steps = [c.step for c in run_.checkpoints]
    segments = rng.randint(1, len(steps))
    train = torch.utils.data.TensorDataset(x[:n], y[:n])
    query = torch.utils.data.TensorDataset(x[n:], y[n:])
    plain: dict[str, Any] = {"coupling": False, "query_at": "final", "floor": 0.0}
    form = whence.Source(segments, curvature="gauss-newton", **plain)
    study = whence.Study(model, task, train, folder / "run")
    options: dict[str, Any] = {"dtype": torch.float64, "progress": False}
    actual = form.attribute(study, query, batch_size=rng.randint(1, n), **options).values
    effective = (1 - settings.get("dampening", 0.0)) / (1 - momentum)
    wanted = paper(
        model,
        task,
        train,
        query,
        [weights[s - 1] for s in steps],
        [preconditioners[s - 1] for s in steps],
        steps,
        rates,
        effective,
        segments,
    )
    what = f"{model}, {kind.__name__} {settings}, {type(scheduler).__name__}, {style}, {late} late"
    what += f", {segments} of {steps}"
    close(actual, wanted, what, 1e-6)


def groups(rng: Rng, model: Any, rate: float) -> list[dict[str, Any]]:
    """The parameters: in one group, or each layer in its own with its own rate."""
    if rng.random() < 0.6:
        return [{"params": list(model.parameters())}]
    layers = [layer for layer in model if list(layer.parameters())]
    return [{"params": layer.parameters(), "lr": rate * rng.uniform(0.2, 2)} for layer in layers]


def rates_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """The rate of every parameter, all in one vector; 0 of a frozen one."""
    rates = {p: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    each = [(p.numel(), rates[p] * p.requires_grad) for p in model.parameters()]
    return torch.cat([torch.full((n,), r, dtype=torch.float64) for n, r in each])


def preconditioner(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """P of appendix C, of all parameters in one vector: 1, or 1/(√v̂ + ε)."""
    settings, parts = optimizer.param_groups[0], []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        v = state.get("exp_avg_sq", state.get("square_avg"))
        if v is None:
            parts.append(torch.ones(parameter.numel(), dtype=torch.float64))
            continue
        if "exp_avg_sq" in state:
            v = v / (1 - settings["betas"][1] ** float(state["step"]))
        parts.append(1 / (v.sqrt() + settings["eps"]).flatten())
    return torch.cat(parts).clone()


def paper(
    model: nn.Module,
    task: Any,
    train: Any,
    query: Any,
    checkpoints: list[dict[str, Tensor]],
    preconditioners: list[Tensor],
    steps: list[int],
    rates: list[Tensor],
    effective: float,
    segments: int,
) -> np.ndarray:
    """Section 3 and appendix C of the paper: with one segment of K updates at rate η, mean gradient
    ḡ, preconditioner P (1 for SGD), D = ηK P, H and M = D^½ H D^½,

        S = D^½ exp(-M) D^-½,   r = D^½ (I - exp(-M)) M⁻¹ D^½ ḡ,
        score = -(1/N) ∇f · Σ_l S_L … S_{l+1} r_l,

    with all parameters in one vector and H their whole Gauss-Newton matrix.
    """

    def flat(values: dict[str, Tensor]) -> Tensor:
        return torch.cat([values[name].flatten() for name, _ in model.named_parameters()])

    def outputs(parameters: dict[str, Tensor], example: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (example[None],))[0]

    def gradient(at: dict[str, Tensor], data: Any, k: int) -> Tensor:
        inputs, target = data[k]

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            batch = (inputs[None], target[None])
            return task.losses(outputs(parameters, inputs)[None], batch)[0]

        return flat(torch.func.grad(loss)({n: at[n] for n, _ in model.named_parameters()}))

    def curvature(at: dict[str, Tensor]) -> Tensor:
        total: Any = 0
        parameters = {n: at[n] for n, _ in model.named_parameters()}
        for inputs, target in train:
            jacobian = torch.func.jacrev(lambda p, i=inputs: outputs(p, i))(parameters)
            rows = torch.cat([jacobian[n].flatten(1) for n in parameters], 1)
            out = outputs(parameters, inputs)

            def loss(o: Tensor, i: Tensor = inputs, t: Tensor = target) -> Tensor:
                return task.losses(o[None], (i[None], t[None]))[0]

            total = total + rows.T @ torch.func.hessian(loss)(out) @ rows
        return total / len(train)

    dealt = np.array_split(np.arange(len(checkpoints)), segments)
    vectors = torch.stack([gradient(checkpoints[-1], query, k) for k in range(len(query))])
    score: Any = 0
    for members in reversed(dealt):
        start, end = steps[members[0] - 1] if members[0] else 0, steps[members[-1]]
        time_ = torch.stack(rates[start:end]).sum(0).clamp(min=1e-12) * effective  # 0 if frozen
        H = torch.stack([curvature(checkpoints[c]) for c in members]).mean(0)
        each = [
            torch.stack([gradient(checkpoints[c], train, k) for k in range(len(train))])
            for c in members
        ]
        mean = torch.stack(each).mean(0)
        root = (time_ * torch.stack([preconditioners[c] for c in members]).mean(0)).sqrt()
        M = root[:, None] * H * root
        score = score - (vectors * root @ dense.F_r(M, 1.0) * root) @ mean.T / len(train)
        vectors = vectors * root @ dense.F_S(M, 1.0) / root
    return score.detach().numpy()  # type: ignore[no-any-return]


def random_program(rng: Rng, folder: Path) -> None:
    ended = run(lambda: str(program(rng, folder)))
    if not ended.fine:
        raise Broken(ended.error or f"signal {ended.signal}")


ATTEMPTS: dict[str, Callable[[Rng, Path], None]] = {
    "SIGKILL": kill,
    "flipped bytes": byte_flip,
    "full disk": full_disk,
    "several processes": several_processes,
    "hostile files": hostile_file,
    "hostile texts": hostile_text,
    "random networks": random_network,
    "random programs": random_program,
}
