"""The study of tracked layers: its rows, and what the documentation says about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support import models
from torch import nn

from experiments.studies.layers import CHOICES, store
from experiments.tasks import RESULTS
from experiments.tasks.forms import DEFAULT_BY_STAGE, read_results

PROTOCOL = {"subsets": 4, "alpha": 0.5, "device": "cpu"}


def row(lds: float, seconds: float | None) -> dict[str, Any]:
    return {"lds": lds, "seconds": seconds}


def test_rows_are_added_and_measured_times_stay(tmp_path: Path) -> None:
    file = tmp_path / "results" / "layers.json"
    store(file, "task", PROTOCOL, "Source", "all", row(0.5, 3.0))
    store(file, "task", PROTOCOL, "Source", "matrices", row(0.25, 2.0))
    store(file, "task", PROTOCOL, "Source", "all", row(0.5, None))  # from saved scores
    store(file, "task", PROTOCOL | {"subsets": 8}, "Source", "all", row(0.75, 1.0))
    first, second = json.loads(file.read_text())["tasks"]["task"]
    assert first["methods"]["Source"] == {"all": row(0.5, 3.0), "matrices": row(0.25, 2.0)}
    assert second["methods"]["Source"] == {"all": row(0.75, 1.0)}


def test_choices() -> None:
    modules: dict[str, nn.Module] = dict(models.Transformer().named_modules())
    named = {name: modules[name] for name in ("wte", "wpe", "h.0.ln_1", "h.0.c_fc", "lm_head")}
    plain = {"h.0.c_fc", "lm_head"}
    assert CHOICES["matrices"](named) == plain
    assert CHOICES["matrices and embeddings"](named) == plain | {"wte", "wpe"}
    assert CHOICES["matrices and norms"](named) == plain | {"h.0.ln_1"}
    assert CHOICES["all"](named) == set(named)


def test_embeddings_more_than_double_the_lds_of_source() -> None:
    """docs/layers.md says so, and that norms change hardly anything."""
    entry = json.loads((RESULTS / "layers.json").read_text())["tasks"]["wikitext2-quick"][0]
    rows = entry["methods"]["Source"]
    assert rows["all"]["lds"] > 2 * rows["matrices"]["lds"]
    assert rows["all"]["minus matrices"][1] > 0.2  # the lower end of its interval
    assert abs(rows["matrices and norms"]["minus matrices"][0]) < 0.01


def test_batch_norms_hardly_matter() -> None:
    """docs/layers.md says so."""
    (entry,) = json.loads((RESULTS / "layers.json").read_text())["tasks"]["cifar10_small"]
    for rows in entry["methods"].values():
        assert rows["all"]["tracked"] == 1 > rows["matrices"]["tracked"]
        assert max(map(abs, rows["all"]["minus matrices"])) < 0.01  # the whole interval


def test_a_bert_from_scratch_needs_its_embeddings() -> None:
    """docs/layers.md says so."""
    (entry,) = json.loads((RESULTS / "layers.json").read_text())["tasks"]["sst2_small"]
    for method in ("Source", "Influence"):
        rows = entry["methods"][method]
        assert rows["all"]["lds"] > 2 * rows["matrices"]["lds"]
        assert rows["matrices and embeddings"]["minus matrices"][1] > 0  # the interval's lower end
        assert abs(rows["matrices and norms"]["minus matrices"][0]) < 0.01
    _, low, high = entry["methods"]["TracIn"]["all"]["minus matrices"]
    assert low < 0 < high


def test_all_layers_are_as_good_as_matrices_where_an_encoder_is_fine_tuned() -> None:
    """docs/layers.md says so."""
    entries = read_results(RESULTS / "forms.json")["tasks"]["rte"]
    name = f"{DEFAULT_BY_STAGE}, all layers"
    (row,) = [entry["forms"][name] for entry in entries if name in entry["forms"]]
    gap, *_ = row["over"][DEFAULT_BY_STAGE]["single"]
    assert abs(gap) < 0.01
