"""Rewrite a forms.json of the first version (one entry for each task) as the second.

    python -m experiments.studies.migrate_forms FILE

The first version stored real / predicted as `spread`, and the number of queries that were asked
for, not the number that a task has. All other numbers stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from experiments.studies.sums import Protocol
from experiments.tasks import TASKS
from experiments.tasks.forms import PUBLISHED, SCHEMA
from whence.persist.files import write_json


def entry(task: str, old: dict[str, Any]) -> dict[str, Any]:
    """An entry of the second version."""
    of = dict(old["of"])
    of["queries"] = min(of["queries"], len(TASKS[task].recipe()[1]))
    protocol = Protocol(task, **of)
    forms = {}
    for name, given in old["forms"].items():
        row = dict(given)
        gains = {kind: row.pop(f"gain, {kind}", None) for kind in ("single", "ensemble")}
        row |= {"runs": of["runs"], "spread": 1 / row["spread"]}
        if of["runs"] == 1:  # it was that of the one model
            row["ensemble"] = gains["ensemble"] = None
        gains = {kind: gap for kind, gap in gains.items() if gap is not None}
        forms[name] = row | {"over": {PUBLISHED: gains} if gains else {}}
    described = vars(protocol) | {}
    del described["task"]
    about = {name: old[name] for name in ("machine", "device")}
    return {"protocol": described, "forms": forms, **about, "chosen_on": protocol.chosen_on}


def main() -> None:
    file = Path(sys.argv[1])
    stored = json.loads(file.read_text())
    if stored.get("schema") == SCHEMA:
        raise SystemExit(f"{file} has schema {SCHEMA} already")
    tasks = {task: [entry(task, old)] for task, old in stored["tasks"].items()}
    write_json(file, {"schema": SCHEMA} | stored | {"tasks": tasks}, checksum=False)


if __name__ == "__main__":
    main()
