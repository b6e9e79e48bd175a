"""Where the time goes on a GPU: the profiler's table for one workload and precision.

python -m benchmarks.profile_gpu gpt bf16
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.on_gpu import SIZES, influence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=list(SIZES))
    parser.add_argument("precision", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--share", type=int, default=8, help="use one part in SHARE of the data")
    parser.add_argument("--rows", type=int, default=25)
    chosen = parser.parse_args()
    work, train, query = SIZES[chosen.workload]
    torch.set_float32_matmul_precision("high" if chosen.precision == "tf32" else "highest")
    dtype = torch.bfloat16 if chosen.precision == "bf16" else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    warnings.simplefilter("ignore")
    model = work.model().eval()
    data, queries = work.data(train // chosen.share, 1), work.data(query, 2)
    options = {"device": device, "dtype": dtype}
    influence(work, model, work.data(256, 1), queries, **options)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=kinds) as profiled:
        scores = influence(work, model, data, queries, **options)
    print(scores.diagnostics["seconds"])
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = profiled.key_averages().table(
        sort_by=key, row_limit=chosen.rows, max_name_column_width=50
    )
    print(table)


if __name__ == "__main__":
    main()
