"""Results are carried over to a new identity only where the recipe is shown to be the same."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import tasks
from tools import carry_results

DIGITS = tasks.TASKS["digits_adamw"]


def test_only_the_same_recipe_is_carried_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carry_results, "RESULTS", tmp_path)
    described = carry_results.describe(DIGITS, False)
    assert len(described["does"]["train 0"]["weights"]) == carry_results.UPDATES
    new = copy.deepcopy(described)
    new["identity"]["more"], new["recipe"] = "digested now", "new"
    result = {"lds": {"SOURCE": 1.0}, "recipe": described["recipe"]}
    (tmp_path / "texts").mkdir()
    files = [tmp_path / "digits_adamw.json", tmp_path / "texts/digits_adamw.json"]
    for file in files:
        file.write_text(json.dumps(result))

    rates = DIGITS.chosen_rates()
    changed = carry_results.describe(replace(DIGITS, rates=(2 * rates[0], rates[1])), False)
    answer = carry_results.stamp("digits_adamw", described, changed)
    assert answer == "LEFT: the recipe changed: train 0, losses 0, measurements 0, " + (
        "train 1001, losses 1001, measurements 1001"
    )
    stranger = described | {"recipe": "of another commit"}
    assert "the old code names" in carry_results.stamp("digits_adamw", stranger, new)
    assert all(json.loads(file.read_text()) == result for file in files)

    assert carry_results.stamp("digits_adamw", described, new) == "carried over"
    written = [json.loads(file.read_text()) for file in files]
    assert written[0] == result | {"recipe": "new", "identity": new["identity"]}
    assert written[1] == result | {"recipe": "new"}
    assert carry_results.stamp("digits_adamw", described, new) == "is up to date"
