"""The results page: what the script makes of the committed results, and of any others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.pages import claims, figures, numbers_page, panels, tables, two_weights
from experiments.pages import reproduce_page as page
from experiments.pages.claims import ABSENT, FAILS, HOLDS, OPEN
from experiments.tasks import RESULTS, TASKS, data
from experiments.tasks.methods import GAUSS_NEWTON

ROOT = Path(__file__).parents[2]

OF = {"subsets": 100, "seeds": 10, "queries": 500, "runs": 10}
IN_PAGE = re.compile(r"\]\(figures/reproduce/([^)]*)\)")
HOSTILE = (
    "<script>alert(1)</script> | [a](javascript:alert(2)) ![b](//c/d.png) `e` **f** _g_ $h$ "
    '&lt; \\| {: onclick=i } --8<-- "README.md" <!-- k --> ^l^\n\n# m\n\u202etxt'
)


def entry(
    single: float | None, ensemble: float | None = None, half: float = 0.01
) -> dict[str, Any]:
    """An LDS with intervals of ± half."""
    values = [None if v is None else [v, v - half, v + half] for v in (single, ensemble)]
    return {
        "single": values[0],
        "ensemble": values[1],
        "ceiling": 0.9,
        "diverged": 0,
        "of": dict(OF),
        "method": "Method()",
        "slope": 0.5,
        "seconds": 1.0,
    }


def result(task: str, lds: dict[str, dict[str, Any]], quick: bool = False) -> dict[str, Any]:
    versions = {"processor": "P", "python": "3", "torch": "2", "whence": "0", "date": "2026-01-01"}
    return {
        "schema": 2,
        "task": task,
        "quick": quick,
        "recipe": "r" * 64,
        "rate": 0.1,
        "weight_decay": 0.0,
        "lds": lds,
        "seconds": {},
        "examples": 100,
        "device": "CPU",
        "tf32": False,
        "machine": versions,
        "commands": [f"whence reproduce {task}"],
    }


def paper(source: float = 0.5, **changed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results in the paper's order."""
    values = {"RepSim": 0.05, "TracIn": 0.2, "TRAK": 0.1, "influence": 0.3, "FastSource": 0.45}
    lds = {name: entry(v, v + 0.05) for name, v in values.items()}
    return lds | {"SOURCE": entry(source, source + 0.05)} | changed


def write(folder: Path, name: str, stored: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(stored))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Path]:
    """All figures of the committed results, drawn anew; no text is written into the results."""
    docs = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "write_json", lambda *given, **options: None)
        return set(page.draw(docs=docs)), docs / figures.FOLDER


def both_pages(folder: Path) -> str:
    return page.text(folder, folder) + numbers_page.text(folder)


def test_the_pages_are_made_of_the_results() -> None:
    for name, text in (("reproduce", page.text()), ("reproduce-numbers", numbers_page.text())):
        again = "python -m experiments.pages.reproduce_page"
        assert text == (ROOT / f"docs/{name}.md").read_text(), again
        assert "<!--" not in text


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "docs/reproduce.md").read_text().split()) < 3000


def test_figures_are_those_that_the_script_makes(drawn: tuple[set[str], Path]) -> None:
    names, _ = drawn
    in_page = set(IN_PAGE.findall((ROOT / "docs/reproduce.md").read_text()))
    sizes = {file.name: file.stat().st_size for file in (ROOT / "docs" / figures.FOLDER).iterdir()}
    assert in_page == set(sizes), "python -m experiments.pages.reproduce_page"
    assert {name for name in in_page if not name.startswith("examples-")} <= names <= in_page
    assert max(sizes.values()) < 200_000


def test_figures_are_drawn(drawn: tuple[set[str], Path]) -> None:
    from PIL import Image

    names, folder = drawn
    for name in names:
        with Image.open(folder / name) as image:
            pixels = np.asarray(image.convert("L"))
        assert pixels.min() < 100 and pixels.max() > 250 and pixels.std() > 5, name


def test_two_weights_are_predicted_by_unrolling_and_not_by_influence() -> None:
    outcome = two_weights.two_weights(seeds=150)

    def off(name: str, real: Any) -> float:
        return float(np.linalg.norm(outcome.predicted[name] - real) / np.linalg.norm(real))

    assert off("unrolling", outcome.real) < 0.08
    assert off("SOURCE", outcome.real) < 0.12
    assert off("influence", outcome.real) > 1
    assert off("influence", outcome.optimum) < 0.3
    # in closed form: the example's gradient at the end of training by the inverse of the curvature
    ends = outcome.paths[0][-1]
    x, y = outcome.example
    expected = np.linalg.solve(outcome.hessian[0], x * (x @ ends - y)) / 60
    np.testing.assert_allclose(outcome.predicted["influence"], expected, rtol=1e-5)


def test_without_results(tmp_path: Path) -> None:
    text = both_pages(tmp_path)
    assert IN_PAGE.findall(text) == ["unrolling.png"]
    assert (
        f"0 of {len(TASKS)} tasks were run." in text and "0 hold, 0 do not, 0 are undecided" in text
    )
    assert text.count("*Not run yet") > len(TASKS)
    assert "<!--" not in text and "None" not in text


def test_what_differs_is_said() -> None:
    stored = result("rotated_mnist", paper()) | {"tf32": True, "tracked": "the last 1 blocks"}
    for one in stored["lds"].values():
        one["of"] = {"subsets": 60, "seeds": 5, "queries": 100, "runs": 3}
    assert numbers_page.differences(stored, TASKS["rotated_mnist"]) == [
        *TASKS["rotated_mnist"].differs,
        "only the last 1 blocks attributed",
        "M = 60 (the paper: 100)",
        "R = 5 (the paper: 20)",
        "ensembles of 3 (the paper: 10)",
        "trained in TF32",
    ]
    whole = result("concrete_n", paper())
    for one in whole["lds"].values():
        one["of"]["seeds"] = 100
    assert numbers_page.differences(whole, TASKS["concrete_n"]) == []


def test_a_result_of_another_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "mnist", result("mnist", paper()) | {"schema": 1})
    with pytest.raises(ValueError, match=r"mnist\.json has schema version 1, not 2: run `whence"):
        both_pages(tmp_path)


def test_a_quick_result_is_marked(tmp_path: Path) -> None:
    write(tmp_path, "fashion_mnist-quick", result("fashion_mnist", paper(), quick=True))
    text = both_pages(tmp_path)
    assert f"0 of {len(TASKS)} tasks were run, 1 only in the quick version" in text
    assert "### FashionMNIST (quick)" in text and "A smaller version of: MLP 784" in text
    assert "| FashionMNIST (quick) | ✓ | ✓ |" in text
    assert "numbers of the quick version" in text
    write(tmp_path, "fashion_mnist", result("fashion_mnist", paper()))
    assert "quick)" not in both_pages(tmp_path)


def test_a_result_that_is_not_finished(tmp_path: Path) -> None:
    begun = {"RepSim": entry(0.1), "influence": entry(0.2)}
    for one in begun.values():
        one["ceiling"], one["of"]["runs"] = None, 1
    write(tmp_path, "fashion_mnist", result("fashion_mnist", begun))
    write(tmp_path, "rte", result("rte", {}))  # nothing judged yet
    text = both_pages(tmp_path)
    assert f"1 of {len(TASKS)} tasks were run." in text
    assert "Not finished: FashionMNIST (TracIn; TRAK; FastSource; SOURCE, L = 1; SOURCE;" in text
    assert "Downsampling; ensembles of RepSim and influence; other α; panels; removal)." in text
    assert "| influence | 0.20 [0.19, 0.21] | – | 1 |" in text
    assert "Noise ceiling: unknown here" in text
    assert "| FashionMNIST | … | … |" in text
    figure = figures.lds_bars(tables.read(tmp_path), ["fashion_mnist"])
    assert [t.get_text() for t in figure.axes[0].texts] == ["not run"] * 3


def test_beside_the_paper(tmp_path: Path) -> None:
    reference = json.loads((RESULTS / "reference.json").read_text())
    near = {
        name: entry(v[0], reference["fashion_mnist"]["paper"]["ensemble"][name][0])
        for name, v in reference["fashion_mnist"]["paper"]["single"].items()
    }
    text = page.compared({"fashion_mnist": result("fashion_mnist", near)}, reference)
    assert "All 14 numbers are within 0.05" in text and "**no**" not in text
    assert "| SOURCE, L = 3 | 0.46 [0.45, 0.47] | 0.46 ± 0.01 | 0.42 | +0.000 |" in text
    near["influence"] = entry(0.35, 0.50, 0.02)
    text = page.compared({"fashion_mnist": result("fashion_mnist", near)}, reference)
    assert "Not within 0.05 of either: influence, ensemble (+0.050)" not in text
    near["influence"] = entry(0.47, 0.53, 0.02)
    text = page.compared({"fashion_mnist": result("fashion_mnist", near)}, reference)
    assert "**Not within 0.05 of either: influence, one model (+0.170); influence, ensemble" in text
    line = "in the paper, one model: **no**: influence before FastSource, L = 3; influence before"
    assert line in text and "influence before SOURCE, L = 3 (intervals overlap)" in text


# --- claims -------------------------------------------------------------------------------------


def word(task: str, claim: int, stored: dict[str, Any] | None) -> str | None:
    """The verdict on a claim, by its number on the page."""
    verdict = claims.verdicts_by_task({} if stored is None else {task: stored})[task][claim - 1]
    return None if verdict is None else verdict.word


def test_a_comparison_needs_intervals_that_lie_apart() -> None:
    assert claims.above([0.5, 0.45, 0.55], "a", [0.4, 0.35, 0.44], "b").word == HOLDS
    assert claims.above([0.4, 0.35, 0.44], "a", [0.5, 0.45, 0.55], "b").word == FAILS
    overlap = claims.above([0.5, 0.45, 0.55], "a", [0.4, 0.35, 0.46], "b")
    assert overlap.word == OPEN and overlap.why == "a: 0.50 [0.45, 0.55], b: 0.40 [0.35, 0.46]"
    assert claims.above(None, "a", [0.4, 0.35, 0.46], "b").word == ABSENT
    # the difference decides where it is known: for it, against it, or not
    near = [0.5, 0.4, 0.6], "a", [0.48, 0.38, 0.58], "b"
    decided = claims.above(*near, [0.02, 0.01, 0.03])
    assert decided.word == HOLDS and "difference 0.020 [0.010, 0.030]" in decided.why
    assert claims.above(*near, [0.02, -0.01, 0.05]).word == OPEN
    assert claims.above(*near, [-0.02, -0.03, -0.01]).word == FAILS


def test_a_difference_of_other_sizes_does_not_count() -> None:
    sizes = {"subsets": 4, "runs": 3}
    stored: dict[str, Any] = {
        "lds": {"SOURCE": {"of": sizes}, "TracIn": {"of": sizes}},
        "differences": {"SOURCE": {"TracIn": {"single": [1, 1, 1], "of": sizes}}},
    }
    assert claims.difference(stored, "SOURCE", "TracIn") == [1, 1, 1]
    assert claims.difference(stored, "SOURCE", "TracIn", "ensemble", "ensemble") is None
    assert claims.difference(stored, "TracIn", "SOURCE") is None
    stored["lds"]["TracIn"]["of"] = sizes | {"subsets": 5}
    assert claims.difference(stored, "SOURCE", "TracIn") is None
    stored["lds"]["TracIn"]["of"] = one_model = sizes | {"runs": 1}
    assert claims.difference(stored, "SOURCE", "TracIn") is None
    stored["differences"]["SOURCE"]["TracIn"]["of"] = one_model
    assert claims.difference(stored, "SOURCE", "TracIn") == [1, 1, 1]


def test_source_is_first() -> None:
    assert word("concrete", 1, None) == ABSENT
    assert word("concrete", 1, result("concrete", paper())) == HOLDS
    assert word("concrete", 1, result("concrete", paper(source=0.2))) == FAILS
    close = result("concrete", paper(influence=entry(0.49, 0.6)))
    assert (word("concrete", 1, close), word("concrete", 2, close)) == (OPEN, FAILS)
    without = paper()
    del without["TRAK"]
    assert word("concrete", 1, result("concrete", without)) == ABSENT
    without["influence"] = entry(0.7)  # that it is not first is certain already
    assert word("concrete", 1, result("concrete", without)) == FAILS
    lonely = {name: entry(one["single"][0]) for name, one in paper().items()}
    assert word("concrete", 2, result("concrete", lonely)) == ABSENT
    assert word("cifar10", 2, result("cifar10", paper())) is None  # not claimed


def test_other_methods_explain_why_source_is_not_first() -> None:
    lds = paper(source=0.2) | {GAUSS_NEWTON: entry(0.2)}
    (text,) = page.causes({"concrete": result("concrete", lds)}, ["concrete"])
    assert "Concrete: with the full Gauss-Newton matrix" in text and "λP⁻¹" not in text
    lds[GAUSS_NEWTON] = entry(0.6)  # better: it may well be EK-FAC
    assert page.causes({"concrete": result("concrete", lds)}, ["concrete"]) == []
    lds[GAUSS_NEWTON] = entry(0.2) | {"of": lds["SOURCE"]["of"] | {"runs": 2}}  # of other models
    assert page.causes({"concrete": result("concrete", lds)}, ["concrete"]) == []
    adam = paper(source=0.2) | {"SOURCE, exact": entry(0.7)}
    (text,) = page.causes({"rte": result("rte", adam)}, ["rte"])
    assert "SOURCE has 0.70" in text
    assert "Why SOURCE does not come first" in page.claims_part({"rte": result("rte", adam)})
    assert "Why SOURCE does not come first" not in page.claims_part({"rte": result("rte", paper())})


def test_methods_judged_at_different_sizes_are_not_compared() -> None:
    stored = result("concrete", paper())
    stored["lds"]["TRAK"]["of"]["seeds"] = 100
    assert word("concrete", 1, stored) == OPEN
    assert "different sizes" in numbers_page.evidence({"concrete": stored})
    stored = result("concrete", paper())
    stored["lds"]["TRAK"]["of"]["runs"] = 3  # one model is one model, an ensemble is not
    assert (word("concrete", 1, stored), word("concrete", 2, stored)) == (HOLDS, OPEN)
    stored["lds"]["TRAK"] |= {"ensemble": None}
    assert word("concrete", 2, stored) == ABSENT
    uneven = result("concrete_n", paper())  # SOURCE's single number, beside ensembles of one size
    uneven["lds"]["SOURCE"]["of"]["runs"] = 3
    assert word("concrete_n", 4, uneven) == HOLDS
    uneven["lds"]["TRAK"]["of"]["runs"] = 3
    assert word("concrete_n", 4, uneven) == OPEN


def test_claims_where_training_did_not_converge() -> None:
    usual = result("concrete_n", paper())
    assert word("concrete_n", 3, usual) == FAILS  # TracIn .2, influence .3
    assert word("concrete_n", 4, usual) == HOLDS
    other = result("concrete_n", paper(TracIn=entry(0.48, 0.55)))
    assert (word("concrete_n", 3, other), word("concrete_n", 4, other)) == (HOLDS, FAILS)
    assert word("concrete", 3, usual | {"task": "concrete"}) is None
    text = numbers_page.evidence({"concrete_n": other})
    assert (
        "- Concrete-N, claim 4: SOURCE, L = 3: 0.50 [0.49, 0.51], TracIn (ensemble): 0.55" in text
    )


def test_fastsource_and_segments() -> None:
    stored = result("fashion_mnist", paper() | {"SOURCE, L = 1": entry(0.505)})
    assert [word("fashion_mnist", k, stored) for k in (5, 6, 7)] == [HOLDS, HOLDS, OPEN]


def test_claims_over_alpha_and_by_removal() -> None:
    stored = result("fashion_mnist", paper())
    assert [word("fashion_mnist", k, stored) for k in (8, 9, 12)] == [ABSENT] * 3
    stored["alpha"] = {f"{a:g}": paper() for a in TASKS["fashion_mnist"].full.alphas}
    assert word("fashion_mnist", 8, stored) == HOLDS
    assert word("fashion_mnist", 9, stored) == OPEN  # as high as at ½
    stored["alpha"]["1"] = {name: entry(0.0) for name in paper()}
    assert (word("fashion_mnist", 8, stored), word("fashion_mnist", 9, stored)) == (HOLDS, HOLDS)
    del stored["alpha"]["0.3"]
    assert word("fashion_mnist", 8, stored) == ABSENT
    stored["removal"] = {
        "k": [10, 20],
        "queries": 50,
        "trainings": 100,
        "flipped": {"SOURCE": [0.1, 0.6], "TRAK": [0.3, 0.4], "Random": [0, 0.9]},
        "interval": {
            "SOURCE": [[0, 0.2], [0.5, 0.7]],
            "TRAK": [[0.2, 0.4], [0.3, 0.45]],
            "Random": [[0, 0], [0.8, 1]],
        },
    }
    assert word("fashion_mnist", 12, stored) == HOLDS
    stored["removal"]["interval"]["TRAK"][1][1] = 0.55
    assert word("fashion_mnist", 12, stored) == OPEN
    stored["removal"]["differences"] = {"TRAK": [[-0.2, -0.3, -0.1], [0.2, 0.05, 0.3]]}
    assert word("fashion_mnist", 12, stored) == HOLDS


def test_claims_of_linear_models() -> None:
    def one(value: float) -> dict[str, Any]:  # a lone run
        return entry(None, value)

    stored = result("linear_regression", {"SOURCE, L = 1": entry(0.9), "TracIn": entry(0.7)})
    stored["lds"]["influence"] = entry(0.8)
    few, most = {"SOURCE, L = 1": one(0.8), "influence": one(0.5)}, {"influence": one(0.85)}
    stored["epochs"] = {"1": few, "50": most}
    stored["optimum"] = {"0.1": {"influence": one(0.6)}, "1": {"influence": one(0.99)}}
    assert [word("linear_regression", k, stored) for k in (1, 2, 10, 11)] == [
        HOLDS,
        None,
        ABSENT,
        HOLDS,
    ]
    most["SOURCE, L = 1"] = one(0.87)
    assert word("linear_regression", 10, stored) == HOLDS
    most["influence"] = one(0.58)
    assert word("linear_regression", 10, stored) == OPEN


# --- text from elsewhere ------------------------------------------------------------------------


def test_texts_are_nothing_but_text(tmp_path: Path) -> None:
    markdown = pytest.importorskip("markdown")
    stored = result("rte", paper())
    stored["panels"] = {
        "of": {"queries": 1, "runs": 5},
        "methods": {"SOURCE": [{"helpful": [7, 8], "harmful": [9, 4]}]},
    }
    write(tmp_path, "rte", stored)
    assert "because the dataset is missing" in both_pages(tmp_path)
    (tmp_path / "texts").mkdir()
    texts = {"recipe": "r" * 64, "query": {"0": HOSTILE}, "train": {"7": HOSTILE, "9": "x" * 999}}
    write(tmp_path / "texts", "rte", texts)
    text = both_pages(tmp_path)
    part = text[text.index("**RTE**") :]
    assert "x" * panels.MAX_LETTERS + " …" in part and "x" * (panels.MAX_LETTERS + 1) not in part
    extensions = ["tables", "attr_list", "md_in_html", "pymdownx.arithmatex", "pymdownx.snippets"]
    html = markdown.markdown(part, extensions=extensions)
    tags = set(re.findall(r"</?([a-z0-9]+)", html))
    assert tags == {"p", "strong", "em", "table", "thead", "tbody", "tr", "th", "td"}, tags
    assert html.count("<td>") == 3 and html.count("<strong>") == html.count("<em>") == 1
    cell = re.findall(r"<td>(.*?)</td>", html, re.S)[1]
    query = re.findall(r"<p><em>Query</em>: (.*?)</p>", html, re.S)[0]
    import html as entities

    for content in (cell, query):
        assert entities.unescape(content) == " ".join(HOSTILE.replace("\u202e", " ").split())
    write(tmp_path / "texts", "rte", texts | {"recipe": "other"})
    assert "because the dataset is missing" in both_pages(tmp_path)


def test_texts_are_those_of_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "glue/RTE"
    folder.mkdir(parents=True)
    rows = [f"{k}\tone {k}\ttwo {k}\t{('entailment', 'not_entailment')[k % 2]}" for k in range(200)]
    for file in ("train.tsv", "dev.tsv"):
        (folder / file).write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]))
    monkeypatch.setenv("WHENCE_DATA", str(tmp_path))
    assert panels.available("rte")
    stored = result("rte", paper())
    panel = {"helpful": [7], "harmful": [190]}
    stored["panels"] = {"of": {}, "methods": {"SOURCE": [panel] * 3}}
    texts = panels.read_texts(stored, TASKS["rte"])
    assert texts["query"]["1"] == "not entailment: one 1 / two 1"
    assert texts["train"] == {
        "7": "not entailment: one 7 / two 7",
        "190": "entailment: one 190 / two 190",
    }


def test_nothing_is_downloaded_for_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHENCE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not any(panels.available(task) for task in panels.NEEDS)
    assert set(panels.NEEDS) == {name for name, e in TASKS.items() if e.panel}
    assert all(file.split("/")[-1] for files in panels.NEEDS.values() for file in files)
    folders = {file.rsplit("/", 1)[0] for files in panels.NEEDS.values() for file in files}
    assert folders <= set(data.SOURCES)
