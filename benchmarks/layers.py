"""What embeddings, norms and a tied head cost: GPT-2 in its proportions, scaled down.

    python -m benchmarks.layers [--width 192] [--layers 6] [--device cpu] [--repeats 3]

Unless `--vocabulary` is given, it keeps GPT-2-small's ratio of the embedding to the blocks (38.6 to
85 million). The model is trained for a few updates by `--optimizer`. Prints the seconds of
`TracIn`, `Influence` and `Source` with `layers="matrices"` and with `layers="all"`, from scratch
and with cached factors, the best of some repeats taken in turn, their ratio, and the seconds of
each kind of work.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings

import torch
from torch.utils.data import TensorDataset

import whence
from experiments.tasks.models import gpt2

RATIO = 38.6 / 85.0


def trained(model: torch.nn.Module, train: TensorDataset, optimizer: str) -> whence.Run:
    """A run of a few updates, with one checkpoint at the end."""
    (ids,) = train.tensors
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    updates = kinds[optimizer](model.parameters(), lr={"sgd": 0.1, "adamw": 1e-3}[optimizer])
    task, batches = whence.LanguageModeling(), torch.split(ids, 8)
    folder = tempfile.mkdtemp()
    with whence.Recorder(folder, model, updates, checkpoints=1, total_steps=len(batches)):
        for batch in batches:
            updates.zero_grad()
            torch.autograd.backward(task.losses(task.outputs(model, [batch]), [batch]).mean())
            updates.step()
    return whence.Run.open(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--only", choices=["TracIn", "Influence", "Source"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    vocabulary = options.vocabulary or int(RATIO * 12 * options.layers * options.width)
    torch.manual_seed(0)
    model = gpt2(vocabulary, options.layers, options.width, options.width // 64, options.length)

    def documents(n: int) -> TensorDataset:
        share = 1 / torch.arange(1, vocabulary + 1).double()  # Zipf's law
        ids = share.multinomial(n * options.length, replacement=True)
        return TensorDataset(ids.view(n, options.length))

    train, query = documents(options.documents), documents(options.queries)
    run = trained(model, train, options.optimizer)
    # other programs do not count on a CPU
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    for method in (whence.TracIn(), whence.Influence(), whence.Source(segments=1)):
        if options.only not in (None, type(method).__name__):
            continue
        work: dict[str, dict[str, float]] = {}
        times: dict[str, dict[str, float]] = {"from scratch": {}, "scores": {}}
        for _ in range(options.repeats):
            for layers in ("matrices", "all"):
                task = whence.LanguageModeling()
                cache = tempfile.mkdtemp()  # nothing is fitted before
                study = whence.Study(model, task, train, run, layers=layers, cache=cache)
                for seconds in times.values():
                    start = clock()
                    scores = method.attribute(study, query, device=options.device, progress=False)
                    seconds[layers] = min(seconds.get(layers, float("inf")), clock() - start)
                    work.setdefault(layers, scores.diagnostics["cpu_seconds"])
        for what, seconds in times.items():
            each = ", ".join(f"{name} {x:.2f} s" for name, x in seconds.items())
            ratio = seconds["all"] / seconds["matrices"]
            print(f"{type(method).__name__}, {what}: {each}, ratio {ratio:.2f}", flush=True)
        for name, kinds in work.items():
            print(f"  {name}:", ", ".join(f"{kind} {x:.2f}" for kind, x in kinds.items()))


if __name__ == "__main__":
    main()
