"""Write benchmarks/README.md from its template and the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def least_of(rounds: int, kind: str = "rounds") -> str:
    """How a time was taken."""
    return "one round" if rounds == 1 else f"the fastest of {rounds} {kind}"


def _peer_table(results: dict[str, Any]) -> list[str]:
    heads = (
        "workload (train × query)",
        "stage",
        "kronfluence",
        "whence",
        "faster",
        "floor",
        "× floor",
    )
    lines = [f"| {' | '.join(heads)} |", "|---|---|---:|---:|---:|---:|---:|"]
    for r in results.values():
        name = f"{r['workload']} ({r['train']:,} × {r['query']})" + (
            "" if r["size"] == "full" else ", reduced"
        )
        rows = {s: (r["kronfluence"][s], r["whence"][s], r["floor"][s]) for s in r["whence"]}
        rows["**total**"] = tuple(sum(column) for column in zip(*rows.values(), strict=True))
        for k, (stage, (peer, mine, floor)) in enumerate(rows.items()):
            lines.append(
                f"| {name if k == 0 else ''} | {stage} | {peer:.2f} | {mine:.2f} "
                f"| {peer / mine:.1f}× | {floor:.2f} | {mine / floor:.2f} |"
            )
        peak = r["memory"]
        lines.append(f"| | peak memory, MiB | {peak['theirs']:.0f} | {peak['ours']:.0f} | | | |")
    return lines


def _notes(results: dict[str, Any]) -> list[str]:
    lines = []
    for r in results.values():
        m = r["machine"]
        lines.append(
            f"- {r['workload']} ({r['size']}): batch {r['batch']}, {r['threads']} thread(s), "
            f"{least_of(r['rounds'], 'alternating rounds')}; matrix product {r['gflops']:.0f} "
            f"GFLOP/s; influence scores of the two agree to {r['agreement']:.1e}; "
            f"{m['processor']}, Python {m['python']}, torch {m['torch']}, {m['date']}."
        )
    return lines


def _source_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| workload | work | CPU seconds | × influence | × a plain pass |",
        "|---|---|---:|---:|---:|",
    ]
    for name, r in results.items():
        if name == "machine":
            continue
        seconds = r["seconds"]
        for k, (work, s) in enumerate(seconds.items()):
            head = f"{name} ({r['train']:,} × {r['query']})" if k == 0 else ""
            ratios = f"{s / seconds['influence']:.2f} | {s / seconds['plain pass']:.1f}"
            lines.append(f"| {head} | {work} | {s:.2f} | {ratios} |")
    return lines


def _gpu_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| workload (train × query) | products | stage | seconds | per second | of the peak |",
        "|---|---|---|---:|---:|---:|",
    ]
    for key, r in results["runs"].items():
        head = f"{key.split()[0]} ({r['train']:,} × {r['query']:,}), batch {r['batch']:,}"
        for k, (stage, v) in enumerate(r["stages"].items()):
            first = f"{head} | {r['precision']}" if k == 0 else " | "
            rate = "" if stage == "eigendecomposition" else f"{v['per_second']:,.0f} {r['unit']}"
            share = f"{v['share_of_peak']:.0%}"
            lines.append(f"| {first} | {stage} | {v['seconds']:.2f} | {rate} | {share} |")
    m = results["machine"]
    peaks = {r["precision"]: r["peak_tflops"] for r in results["runs"].values()}
    rates = ", ".join(f"{name} {value:.0f}" for name, value in peaks.items())
    checks = []
    for name, check in results["checks"].items():
        values = (f"{k} {v:.0e}" if v is not bool(v) else f"{k} {v}" for k, v in check.items())
        checks.append(f"{name}: {', '.join(values)}")
    lines += [
        "",
        f"{results['device']}, torch {m['torch']}, {m['date']}. Measured matrix-product peaks, "
        f"TFLOP/s: {rates}. Checks: {'; '.join(checks)}.",
    ]
    return lines


def _gpu_source_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| products | work | seconds | tokens per second | × a plain pass | peak GiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for precision, r in results.get("source", {}).items():
        plain = r["work"]["plain pass"]["seconds"]
        for k, (name, v) in enumerate(r["work"].items()):
            first = f"{precision} ({r['train']:,} × {r['query']})" if k == 0 else ""
            rate = f"{r['tokens'] / v['seconds']:,.0f}"
            row = (first, name, f"{v['seconds']:.1f}", rate, f"{v['seconds'] / plain:.1f}")
            lines.append(f"| {' | '.join(row)} | {v['memory_gib']:.1f} |")
    return lines


def _profile_table(results: dict[str, Any]) -> list[str]:
    stages = ("covariances", "eigendecomposition", "eigenvalues", "scores")
    heads = ["workload (train × query)", "products", "method", "code", "in all", *stages, "outside"]
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|---|" + "---:|" * 6]
    for r in results["runs"]:
        outside = r["wall"] - sum(r["stages"].values())
        seconds = [r["wall"], *(r["stages"][stage] for stage in stages), outside]
        row = (
            f"{r['workload']} ({r['train']} × {r['query']})",
            r["precision"],
            r["method"],
            r["code"],
        )
        lines.append(f"| {' | '.join([*row, *(f'{x:.2f}' for x in seconds)])} |")
    devices = ", ".join(dict.fromkeys(r["device"] for r in results["runs"]))
    return [*lines, "", f"{devices}. Each is one call after a warm-up."]


def _retraining_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| recipe | trainings | at once | seconds in all | trainings per second "
        "| × a DataLoader loop | × a loop on tensors |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, r in results.items():
        if name == "machine":
            continue
        each = r["seconds_each"]
        cells = (
            f"{name} ({r['updates']:,} updates, batch {r['batch']})",
            f"{r['trainings']:,}",
            f"{r['at_once']:,}",
            f"{each['whence'] * r['trainings']:.2f}",
            f"{1 / each['whence']:.1f}",
            f"{each['DataLoader'] / each['whence']:.1f}",
            f"{each['tensors'] / each['whence']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    m, rounds = results["machine"], {r["rounds"] for n, r in results.items() if n != "machine"}
    lines += [
        "",
        f"{m['processor']}, torch {m['torch']}, {m['date']}; {least_of(max(rounds))}.",
    ]
    return lines


def _unrolled_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| method | seconds | ms per update | of the peak | peak GiB | × the training itself |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, r in results["methods"].items():
        cells = (
            name,
            f"{r['seconds']:.1f}",
            f"{1e3 * r['seconds'] / results['updates']:.1f}",
            f"{r['share_of_peak']:.0%}",
            f"{r['memory_gib']:.1f}",
            f"{r['seconds'] / results['training_seconds']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    m = results["machine"]
    lines += [
        "",
        f"{results['train']:,} examples, {results['updates']:,} updates, {results['query']} "
        "queries; "
        f"{results['device']}, torch {m['torch']}, {m['date']}, float32 products at "
        f"{results['peak_tflops']:.0f} TFLOP/s.",
    ]
    return lines


def _trak_table(results: dict[str, Any]) -> list[str]:
    seconds, memory = results["seconds"], results["memory"]
    return [
        "| | CPU seconds | peak MiB |",
        "|---|---:|---:|",
        f"| traker | {seconds['theirs']:.1f} | {memory['theirs']:.0f} |",
        f"| whence | {seconds['ours']:.1f} ({seconds['theirs'] / seconds['ours']:.1f}× faster) "
        f"| {memory['ours']:.0f} |",
    ]


def _store_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| queries | whole call, ms | product, ms | of the read bandwidth |",
        "|---:|---:|---:|---:|",
    ]
    for queries, r in results["queries"].items():
        times = f"{1e3 * r['whole']:.0f} | {1e3 * r['product']:.0f}"
        lines.append(f"| {queries} | {times} | {r['share']:.0%} |")
    return lines


SECTIONS = {
    "kronfluence": ("against_kronfluence.json", _peer_table),
    "kronfluence notes": ("against_kronfluence.json", _notes),
    "source": ("source_cost.json", _source_table),
    "gpu": ("on_gpu.json", _gpu_table),
    "gpu source": ("on_gpu.json", _gpu_source_table),
    "gpu profile": ("profile_gpu.json", _profile_table),
    "retraining cpu": ("retraining_cpu.json", _retraining_table),
    "retraining cuda": ("retraining_cuda.json", _retraining_table),
    "trak": ("trak_cost.json", _trak_table),
    "store": ("store_cost.json", _store_table),
    "unrolled": ("unrolled_cost.json", _unrolled_table),
}


def write_readme() -> None:
    """Fill the page from whatever results there are."""
    text = (FOLDER / "README.template.md").read_text()
    for mark, (file, lines) in SECTIONS.items():
        path = RESULTS / file
        table = lines(json.loads(path.read_text())) if path.exists() else ["(not measured yet)"]
        text = text.replace(f"<!-- {mark} -->", "\n".join(table))
    (FOLDER / "README.md").write_text(text)


if __name__ == "__main__":
    write_readme()
