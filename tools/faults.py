"""Try to break whence, at random, and write down how often that succeeded.

    python -m tools.faults
    python -m tools.faults --seconds 20 --kind SIGKILL --seed 7
    python -m tools.faults --attempts 1 --kind SIGKILL --seed 12

`docs/trust.md` has the table of the committed result (`python -m tools.tables`). A failed attempt
is printed with its seed, so that it can be repeated: the same kind and seed make the same attempt,
except where the moment of a signal matters.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "experiments" / "results" / "faults.json"


def attempt(kind: str, seed: int) -> str | None:
    """What an attempt broke; None if nothing."""
    attempts = importlib.import_module("faults.attempts").ATTEMPTS
    folder = Path(tempfile.mkdtemp(prefix="whence-faults-"))
    try:
        attempts[kind](random.Random(f"{kind} {seed}"), folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def commit() -> str:
    """What was tested: kinds may have been run at different times."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def try_all(kinds: list[str], attempts: int | None, limit: float, seed: int) -> dict[str, Any]:
    """The numbers of attempts and failures of each kind, and what failed.

    Args:
        attempts: of each kind; None for as many as `limit` seconds allow.
    """
    rows: dict[str, Any] = {}
    for kind in kinds:
        start, failures, number = time.monotonic(), [], seed
        while number - seed < attempts if attempts else time.monotonic() - start < limit:
            failure = attempt(kind, number)
            number += 1
            if failure is not None:
                failures.append({"seed": number - 1, "what": failure[-2000:]})
                print(f"{kind}, seed {number - 1}: {failure}", file=sys.stderr, flush=True)
        seconds, tried = round(time.monotonic() - start), number - seed
        rows[kind] = {"attempts": tried, "failures": len(failures), "seconds": seconds}
        rows[kind] |= {"seed": seed, "commit": commit()}
        rows[kind] |= {"failed": failures}
        print(f"{kind}: {len(failures)} of {tried} failed, {seconds} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attempts", type=int, help="of each kind (default: as time allows)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind")
    parser.add_argument("--kind", action="append", help="only this kind (may be repeated)")
    parser.add_argument("--seed", type=int, default=0, help="of the first attempt")
    parser.add_argument("--out", type=Path, default=RESULT, help="the file to write")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    warnings.simplefilter("ignore")
    import whence
    from experiments.tasks.machine import machine

    importlib.import_module("faults.jobs").often()
    known = list(importlib.import_module("faults.attempts").ATTEMPTS)
    unknown = [kind for kind in options.kind or () if kind not in known]
    if unknown:
        parser.error(f"--kind {unknown[0]!r}: choose from {', '.join(known)}")
    rows = try_all(options.kind or known, options.attempts, options.seconds, options.seed)
    about = {"seed": options.seed, "device": "CPU"}
    about |= {"machine": machine() | {"whence": whence.__version__}}
    if options.kind and options.out.exists():  # replace these kinds only
        rows = json.loads(options.out.read_text())["rows"] | rows
    options.out.write_text(json.dumps({"rows": rows} | about, indent=2) + "\n")


if __name__ == "__main__":
    main()
