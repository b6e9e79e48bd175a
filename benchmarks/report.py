"""benchmarks/README.md, made from the result files. Nothing on that page is typed by hand."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def machine() -> dict[str, str]:
    """Where and with what a result was made."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "processor": model,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


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
            f"- {r['workload']} ({r['size']}): batch {r['batch']}, {r['threads']} thread(s), least "
            f"of {r['rounds']} alternating rounds; matrix product {r['gflops']:.0f} GFLOP/s; "
            f"influence scores of the two agree to {r['agreement']:.1e}; {m['processor']}, Python "
            f"{m['python']}, torch {m['torch']}, {m['date']}."
        )
    return lines


def write_readme() -> None:
    """Fill the page from whatever results there are."""
    text = (FOLDER / "README.template.md").read_text()
    peers = RESULTS / "against_kronfluence.json"
    if peers.exists():
        results = json.loads(peers.read_text())
        text = text.replace("<!-- kronfluence -->", "\n".join(_peer_table(results)))
        text = text.replace("<!-- kronfluence notes -->", "\n".join(_notes(results)))
    (FOLDER / "README.md").write_text(text)


if __name__ == "__main__":
    write_readme()
