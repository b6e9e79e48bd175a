"""whence and kronfluence on the same model, data, batch and threads, alternately, in one process.

    python -m benchmarks.against_kronfluence                 # reduced sizes, a few minutes
    python -m benchmarks.against_kronfluence --full          # the sizes of the issue; an hour
    python -m benchmarks.against_kronfluence mlp --rounds 3

Processor seconds of every stage, the least over the rounds, and the floor: operations that the
stage cannot do without, over the rate of a matrix product measured in the same minute. Influence
scores of the two are compared before anything is timed. Results go to
benchmarks/results/against_kronfluence.json, and from there to benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import whence
from benchmarks.models import WORKLOADS, Workload, final_run
from benchmarks.report import RESULTS, write_readme
from experiments.tasks.machine import machine
from whence.operators import cost

STAGES = ("covariances", "eigendecomposition", "eigenvalues", "scores")
DAMPING = 1e-3


def floors(work: Workload, model: nn.Module, train: int, query: int) -> dict[str, float]:
    """Operations each stage cannot do without."""
    study = whence.Study(
        model, work.task, train=work.data(4, 0), runs=final_run(model), layers="matrices"
    )
    passes = study.passes(
        study.runs[0], device=torch.device("cpu"), dtype=torch.float32, quiet=True
    )["train"]
    each = cost.pass_operations(passes.tracked, query)
    sides = [side for b in passes.tracked.blocks for side in cost.sides(b)]
    return {
        "covariances": train * each["covariances"],
        "eigendecomposition": 9.0 * sum(side**3 for side in sides),
        "eigenvalues": train * each["eigenvalues"],
        "scores": train * each["scores"] + cost.rotations(passes.tracked, query, train),
    }


def ours(
    work: Workload, model: nn.Module, train: Any, query: Any, fisher: str = "sampled"
) -> tuple[dict[str, float], np.ndarray]:
    """Processor seconds by stage, and influence scores, from scratch."""
    study = whence.Study(model, work.task, train=train, runs=final_run(model), layers="matrices")
    method = whence.Influence.published(DAMPING, fisher=fisher)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = method.attribute(study, query, batch_size=work.batch, progress=False)
    return scores.diagnostics["cpu_seconds"], scores.values


def theirs(
    work: Workload, model: nn.Module, train: Any, query: Any, fisher: str = "sampled"
) -> tuple[dict[str, float], np.ndarray]:
    """The same through kronfluence."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task as PeerTask
    from kronfluence.utils.dataset import DataLoaderKwargs

    task = work.task

    class Peer(PeerTask):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            outputs = task.outputs(model, batch)
            if not sample:
                return task.losses(outputs, batch).sum()
            flat = outputs.flatten(0, -2)
            with torch.no_grad():
                drawn = torch.multinomial(flat.detach().softmax(-1), 1).flatten()
            losses = nn.functional.cross_entropy(flat, drawn, reduction="none")
            if work.name == "gpt":
                losses = losses.view(outputs.shape[:2])[:, :-1]
            return losses.sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return task.measurements(task.outputs(model, batch), batch).sum()

        def get_influence_tracked_modules(self) -> list[str] | None:
            return None

    seconds: dict[str, float] = {}

    def timed(stage: str, call: Any) -> Any:
        start = time.process_time()
        result = call()
        seconds[stage] = time.process_time() - start
        return result

    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "bench",
            prepare_model(model, Peer()),
            Peer(),
            cpu=True,
            output_dir=folder,
            disable_tqdm=True,
            log_level=40,
        )
        analyzer.set_dataloader_kwargs(DataLoaderKwargs(num_workers=0))
        factors = FactorArguments(strategy="ekfac", use_empirical_fisher=fisher == "empirical")
        keep = {"dataset": train, "per_device_batch_size": work.batch, "overwrite_output_dir": True}
        timed(
            "covariances",
            lambda: analyzer.fit_covariance_matrices("f", factor_args=factors, **keep),
        )
        timed(
            "eigendecomposition",
            lambda: analyzer.perform_eigendecomposition(
                "f", factor_args=factors, overwrite_output_dir=True
            ),
        )
        timed("eigenvalues", lambda: analyzer.fit_lambda_matrices("f", factor_args=factors, **keep))
        timed(
            "scores",
            lambda: analyzer.compute_pairwise_scores(
                "s",
                "f",
                query,
                train,
                per_device_query_batch_size=len(query),
                per_device_train_batch_size=work.batch,
                score_args=ScoreArguments(damping_factor=DAMPING),
                overwrite_output_dir=True,
            ),
        )
        return seconds, analyzer.load_pairwise_scores("s")["all_modules"].numpy()


def rate() -> float:
    """Operations per second of a matrix product, now."""
    return cost.rate(torch.device("cpu"), torch.float32)


def agreement(work: Workload) -> float:
    """Largest relative difference of the two libraries' scores on a small cut of the workload."""
    torch.manual_seed(0)
    model, train, query = work.model().eval(), work.data(24, 1), work.data(3, 2)
    mine = ours(work, copied(work, model), train, query, "empirical")[1]
    peer = theirs(work, copied(work, model), train, query, "empirical")[1]
    peer = -peer / len(train)  # its sign is that of removal, and it leaves out the 1/N
    return float(abs(mine - peer).max() / abs(peer).max())


def copied(work: Workload, model: nn.Module) -> nn.Module:
    fresh = work.model()
    fresh.load_state_dict(model.state_dict())
    return fresh.eval()


def peak_memory(work: Workload, library: str, train: int, query: int) -> float:
    """Peak resident MiB of one library's whole run in its own process, above its start."""
    code = (
        "import re, torch; torch.set_num_threads(1)\n"
        "from benchmarks import against_kronfluence as b\n"
        "import kronfluence.analyzer\n"
        f"w = b.WORKLOADS[{work.name!r}]; torch.manual_seed(0); m = w.model().eval()\n"
        f"d, q = w.data({train}, 1), w.data({query}, 2)\n"
        "def read(what):\n"
        "    return int(re.search(what + r':\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = read('VmRSS')\n"
        f"b.{library}(w, m, d, q)\n"
        "print((read('VmHWM') - before) / 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def compare(work: Workload, size: str, rounds: int) -> dict[str, Any]:
    train, query = work.sized(size)
    torch.manual_seed(0)
    model, data, queries = work.model().eval(), work.data(train, 1), work.data(query, 2)
    needed = floors(work, model, train, query)
    rounds_by_library: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    rates = []
    for number in range(rounds):
        for name, call in (("ours", ours), ("theirs", theirs)):
            rates.append(rate())
            rounds_by_library[name].append(call(work, copied(work, model), data, queries)[0])
            print(
                f"  round {number + 1} {name:<7}",
                {k: round(v, 2) for k, v in rounds_by_library[name][-1].items()},
                flush=True,
            )
    best = max(rates)
    mine = {s: min(r[s] for r in rounds_by_library["ours"]) for s in STAGES}
    peer = {s: min(r[s] for r in rounds_by_library["theirs"]) for s in STAGES}
    return {
        "workload": work.name,
        "size": size,
        "train": train,
        "query": query,
        "batch": work.batch,
        "rounds": rounds,
        "gflops": best / 1e9,
        "agreement": agreement(work),
        "whence": mine,
        "kronfluence": peer,
        "floor": {s: needed[s] / best for s in STAGES},
        "memory": {k: peak_memory(work, k, *work.reduced) for k in ("ours", "theirs")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "workloads", nargs="*", help=f"which of {', '.join(WORKLOADS)}; default: all"
    )
    parser.add_argument("--full", action="store_true", help="the sizes named in the issue")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="only measure peak memory again")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}: choose from {', '.join(WORKLOADS)}")
    torch.set_num_threads(chosen.threads)
    file = RESULTS / "against_kronfluence.json"
    stored = json.loads(file.read_text()) if file.exists() else {}
    for name in chosen.workloads or list(WORKLOADS):
        print(name, flush=True)
        if chosen.memory:
            work, size = WORKLOADS[name], "full" if chosen.full else "reduced"
            peaks = {k: peak_memory(work, k, *work.reduced) for k in ("ours", "theirs")}
            stored[f"{name}-{size}"]["memory"] = peaks
            file.write_text(json.dumps(stored, indent=1) + "\n")
            write_readme()
            continue
        result = compare(WORKLOADS[name], "full" if chosen.full else "reduced", chosen.rounds)
        stored[f"{name}-{result['size']}"] = result | {
            "machine": machine(),
            "threads": chosen.threads,
        }
        RESULTS.mkdir(exist_ok=True)
        file.write_text(json.dumps(stored, indent=1) + "\n")
        write_readme()
        total = {who: sum(result[who].values()) for who in ("whence", "kronfluence", "floor")}
        print(
            f"  {total['kronfluence'] / total['whence']:.1f}× kronfluence, "
            f"{total['whence'] / total['floor']:.2f}× the floor; "
            f"scores agree to {result['agreement']:.1e}"
        )


if __name__ == "__main__":
    main()
