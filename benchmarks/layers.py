"""What embeddings, norms and a tied head cost: GPT-2 in its proportions, scaled down.

    python -m benchmarks.layers [--width 192] [--layers 6] [--device cpu] [--repeats 3]

The vocabulary keeps GPT-2-small's ratio of the embedding to the blocks (38.6 to 85 million). Prints
the seconds of `Source` and `TracIn` with the default layers and with `layers="all"`, the best of
some repeats taken in turn, and their ratio.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from torch.utils.data import TensorDataset

import whence
from experiments.tasks.models import gpt2

RATIO = 38.6 / 85.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    vocabulary = int(RATIO * 12 * options.layers * options.width)
    torch.manual_seed(0)
    model = gpt2(vocabulary, options.layers, options.width, options.width // 64, options.length)

    def documents(n: int) -> TensorDataset:
        return TensorDataset(torch.randint(0, vocabulary, (n, options.length)))

    train, query = documents(options.documents), documents(options.queries)
    run = whence.Run.from_checkpoints([model.state_dict()], [1], 0.1)
    # other programs do not count on a CPU
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    for method in (whence.TracIn(), whence.Source(segments=1)):
        seconds = {"default": float("inf"), "all": float("inf")}
        for _ in range(options.repeats):
            for name, layers in (("default", None), ("all", "all")):
                task = whence.LanguageModeling()
                study = whence.Study(model, task, train, run, layers=layers)
                start = clock()
                method.attribute(study, query, device=options.device, progress=False)
                seconds[name] = min(seconds[name], clock() - start)
        ratio = seconds["all"] / seconds["default"]
        times = ", ".join(f"{name} {x:.2f} s" for name, x in seconds.items())
        print(f"{type(method).__name__}: {times}, ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
