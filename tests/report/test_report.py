"""The report: what is in the file, what it refuses, and what it makes of strange data."""

from __future__ import annotations

import base64
import html
import json
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import models, recipes
from support.made import scores_of as made
from torch.utils.data import IterableDataset, Subset, TensorDataset

import whence
from whence.engine.tokens import Tokens
from whence.present.predict import predictions
from whence.present.views import harmful_overall, overview, query_view
from whence.report import HTML, check_data, page
from whence.scores import Top

QUIET: dict[str, Any] = {"dtype": torch.float64, "progress": False}


@pytest.fixture(scope="module")
def study() -> whence.Study:
    torch.manual_seed(0)
    model, task, train = models.mlp().double(), whence.Classification(), models.vectors(20)
    history = models.train_run(model, task, train, [3, 6, 9], 0.2)
    return whence.Study(model, task, train=train, runs=history.run)


QUERY = models.vectors(5, seed=1)


@pytest.fixture(scope="module")
def scores(study: whence.Study) -> whence.Scores:
    return whence.Source.published(3).attribute(study, QUERY, by_segment=True, **QUIET)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is embedded in a report: (payload, examples), read as a browser would."""
    found = {}
    for name in ("whence-scores", "whence-examples"):
        pattern = rf'<script type="application/json" id="{name}">(.*?)</script>'
        match = re.search(pattern, path.read_text("utf-8"), re.S)
        assert match
        found[name] = json.loads(match[1])
    return found["whence-scores"], found["whence-examples"]


# -- views: against plain sorting and counting -----------------------------------------------------


def test_segments_of_entries_and_of_queries(scores: whence.Scores) -> None:
    view = query_view(scores, 2, 4)
    assert scores.by_segment is not None
    for entry in view["helpful"] + view["harmful"]:
        expected = scores.by_segment[:, 2, entry["column"]]
        assert entry["segments"] == pytest.approx(expected, rel=1e-4)
        assert sum(entry["segments"]) == pytest.approx(entry["value"], rel=1e-3, abs=1e-8)
    total = np.sum(view["segments"], 1)
    assert total == pytest.approx(scores.by_segment[:, 2].sum(1), rel=1e-3, abs=1e-8)
    assert [s["name"] for s in overview(scores)["segments"]] == [
        "updates 0–3",
        "updates 3–6",
        "updates 6–9",
    ]


def test_a_truth_judges_the_scores_and_gives_them_their_size(tmp_path: Path) -> None:
    recipe, query = recipes.recipe(), recipes.dataset(4, 7)
    study = whence.Study(
        recipes.mlp(), recipe.task, recipes.dataset(), recipe.run(0, tmp_path / "run")
    )
    scores = whence.Source().attribute(study, query, progress=False)
    truth = whence.retrain.ground_truth(recipe, query, subsets=12, seeds=2, progress=False)
    shown, _ = read(scores.report(tmp_path / "judged.html", study=study, query=query, truth=truth))
    sized = whence.evaluate.calibrate(scores, truth)
    slope = whence.evaluate.calibration(scores, truth).slope
    judged = dict(shown["summary"]["judged"])
    assert judged["real change per predicted change"].startswith(f"{slope:.2f} [")
    lds = whence.evaluate.lds(scores, truth).value
    assert judged["rank correlation with retraining (LDS)"].startswith(f"{lds:.2f} [")
    assert judged["judged by"] == "12 subsets × 2 seeds"
    assert shown["overview"]["calibrated"]
    best = shown["queries"][0]["helpful"][0]
    assert best["value"] == pytest.approx(sized.values[0].max(), rel=1e-3)
    assert abs(sized.values[0].max() / scores.values[0].max() - 1) > 0.01  # it can fail
    plain, _ = read(scores.report(tmp_path / "plain.html", study=study, query=query))
    assert plain["summary"]["judged"] == [] and not plain["overview"]["calibrated"]
    again, _ = read(sized.report(tmp_path / "sized.html", query=query, truth=truth))
    assert again["queries"][0]["helpful"][0]["value"] == best["value"]  # not sized twice


def test_scores_of_which_only_the_top_was_kept(study: whence.Study, tmp_path: Path) -> None:
    whole = whence.TracIn().attribute(study, QUERY, **QUIET)
    top = whence.TracIn().attribute(study, QUERY, top=4, **QUIET)
    for row in range(5):
        ours, theirs = query_view(top, row, 4), query_view(whole, row, 4)
        for end in ("helpful", "harmful"):
            assert ours[end] == theirs[end][: len(ours[end])]
        assert ours["histogram"] is None and ours["harmed"] is None
    values, columns = top.row_scores(0)
    assert values == pytest.approx(whole.values[0][columns])
    # everything kept twice (at both ends) is counted once
    few = whence.TracIn().attribute(study, QUERY, top=20, **QUIET)
    assert harmful_overall(few, 5)["entries"] == harmful_overall(whole, 5)["entries"]
    path = top.report(tmp_path / "top.html", study=study, query=QUERY, k=9)
    assert any("Only the top 4 at each end" in n for n in read(path)[0]["overview"]["notes"])


# -- the file --------------------------------------------------------------------------------------


def test_what_the_report_holds(study: whence.Study, scores: whence.Scores, tmp_path: Path) -> None:
    path = scores.report(
        tmp_path / "r.html", query=QUERY, study=study, classes=["a", "b", "c"], k=3, title="<T>"
    )
    payload, shown = read(path)
    assert payload["title"] == "<T>" and "<title>&lt;T&gt;</title>" in path.read_text()
    assert (
        payload["overview"]["method"] == "Source.published"
        and payload["overview"]["unit"] == "logits"
    )
    assert payload["overview"]["notes"] == []
    used = {e["column"] for v in payload["queries"] for e in v["helpful"] + v["harmful"]}
    used |= {e["column"] for e in payload["harmful"]["entries"]}
    used |= {e["column"] for end in ("helpful", "harmful") for e in payload["summary"][end]}
    assert set(map(int, shown["examples"])) == used and not shown["ids"]
    example = shown["examples"][str(payload["queries"][0]["helpful"][0]["column"])]
    assert example["kind"] == "row" and example["label"] in "abc"


def test_numbers_are_not_counted_as_classes(tmp_path: Path) -> None:
    scores = made(np.random.default_rng(0).standard_normal((2, 20)))
    x, y = torch.randn(20, 3), torch.randint(3, (20,))
    for labels, counted in ((y, True), (y.double() + 0.25, False)):
        payload, _ = read(scores.report(tmp_path / "r.html", train=TensorDataset(x, labels)))
        assert [view["classes"] is not None for view in payload["queries"]] == [counted] * 2


def test_predictions_are_the_final_models(study: whence.Study, tmp_path: Path) -> None:
    model = models.mlp().double()
    model.load_state_dict(study.runs[0].final.weights())
    model.eval()
    x, y = QUERY.tensors
    logits = model(x).detach()
    others = logits.clone()
    others[torch.arange(5), y] = -torch.inf
    margin = logits[torch.arange(5), y] - others.logsumexp(1)
    before = {k: v.clone() for k, v in study.model.state_dict().items()}
    study.model.train()
    found = predictions(study, QUERY, [3, 0])
    assert study.model.training
    assert all(torch.equal(v, before[k]) for k, v in study.model.state_dict().items())
    for index in (3, 0):
        assert found[index]["measurement"] == pytest.approx(float(margin[index]))
        assert found[index]["output"]["class"] == int(logits[index].argmax())
        most = float(logits[index].softmax(0).max())
        assert found[index]["output"]["probability"] == pytest.approx(most)


def test_a_study_of_other_runs_is_refused(
    study: whence.Study, scores: whence.Scores, tmp_path: Path
) -> None:
    other = models.mlp().double()
    run = whence.Run.from_checkpoints([other.state_dict()], [3], 0.1)
    train = study.train["train"]
    wrong = whence.Study(other, whence.Classification(), train=train, runs=run)
    with pytest.raises(ValueError, match="the study does not have the run that the scores"):
        scores.report(tmp_path / "r.html", study=wrong, query=QUERY)
    pair = (torch.zeros(5, 4), torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"a tuple of 2 tensors, .* such as TensorDataset\(x, y\)"):
        study.query(pair)
    with pytest.raises(ValueError, match="query batches are built like"):
        scores.report(tmp_path / "r.html", study=study, query=list(range(5)), check=False)


def test_predictions_of_other_tasks() -> None:
    torch.manual_seed(0)
    model = models.mlp((4, 3, 1)).double()
    data = models.regression(6)
    run = whence.Run.from_checkpoints([model.state_dict()], [3], 0.1)
    several = whence.Study(model, whence.Regression(), train=data, runs=[run, run])
    found = predictions(several, data)
    outputs = model(data.tensors[0]).detach().flatten()
    errors = (outputs - data.tensors[1].flatten()).abs()
    for k in range(6):
        assert found[k]["output"]["value"] == pytest.approx(float(outputs[k]))
        assert found[k]["measurement"] == pytest.approx(float(errors[k]))
    language = models.Transformer().double()
    run = whence.Run.from_checkpoints([language.state_dict()], [3], 0.1)
    texts = models.documents()
    study = whence.Study(language, whence.LanguageModeling(), train=texts, runs=run)
    assert all(one["output"] is None for one in predictions(study, texts).values())


def test_without_a_study_it_is_said(
    scores: whence.Scores, study: whence.Study, tmp_path: Path
) -> None:
    payload, shown = read(
        scores.report(tmp_path / "r.html", train=study.train["train"], query=QUERY)
    )
    assert any(
        "Predictions and measurements are not shown" in n for n in payload["overview"]["notes"]
    )
    assert payload["queries"][0]["prediction"] is None
    payload, shown = read(scores.report(tmp_path / "r.html"))
    assert any("No training data was given" in note for note in payload["overview"]["notes"])
    assert {e["kind"] for e in shown["examples"].values()} == {"missing"}


def test_self_influence_is_an_audit_list(study: whence.Study, tmp_path: Path) -> None:
    selves = whence.Source.published(3).attribute(study, **QUIET)
    payload, shown = read(selves.report(tmp_path / "r.html", study=study))
    ranked = [e["column"] for e in payload["audit"]["helpful"]]
    assert ranked == [e.example for e in selves.helpful(k=20) if e.value > 0]
    assert all(shown["examples"][str(column)]["prediction"] in "012" for column in ranked)
    with pytest.raises(ValueError, match="self-influence has none"):
        selves.report(tmp_path / "r.html", queries=[0])
    with pytest.raises(ValueError, match="self-influence scores, which have no queries"):
        selves.report(tmp_path / "r.html", query=QUERY)


def test_stages_are_told_apart(tmp_path: Path) -> None:
    """Ids repeat: a column is (stage, id), and shows the example of its own stage."""
    data = {"pre": [("old a", 0), ("old b", 1)], "fine": [("new a", 1), ("new b", 0)]}
    scores = made(
        [[4.0, 3.0, 2.0, 1.0]], train_ids=[0, 1, 0, 1], stage=["pre", "pre", "fine", "fine"]
    )
    labels = {"pre": ["p0", "p1"], "fine": ["f0", "f1"]}
    payload, shown = read(scores.report(tmp_path / "r.html", train=data, labels=labels))
    texts = [shown["examples"][str(e["column"])] for e in payload["queries"][0]["helpful"]]
    assert [(t["text"], t["stage"], t["id"], t["label"]) for t in texts] == [
        ("old a", "pre", 0, "p0"),
        ("old b", "pre", 1, "p1"),
        ("new a", "fine", 0, "f0"),
        ("new b", "fine", 1, "f1"),
    ]
    with pytest.raises(ValueError, match=r"train has the stages \['pre'\], but the scores have"):
        scores.report(tmp_path / "r.html", train={"pre": data["pre"]})
    with pytest.raises(ValueError, match=r"give train=\{'pre': dataset"):
        scores.report(tmp_path / "r.html", train=data["pre"])


def test_token_scores_are_put_on_their_examples(tmp_path: Path) -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join("abcde"[i] for i in ids)

    data = models.documents()  # padded on the right
    scores = made(np.arange(12.0).reshape(2, 6) - 5)
    tokens = [Tokens(5, np.arange(8.0).reshape(2, 4), np.zeros(2))]
    payload, shown = read(
        scores.report(tmp_path / "r.html", train=data, tokenizer=Letters(), tokens=tokens, k=2)
    )
    entry = payload["queries"][1]["helpful"][0]
    assert entry["column"] == 5 and entry["tokens"] == [4, 5, 6, 7]
    row = data[5]
    real = [int(i) for i, m in zip(row["input_ids"], row["attention_mask"], strict=True) if m]
    assert shown["examples"]["5"]["text"] == Letters().decode(real)
    assert len(shown["examples"]["5"]["pieces"]) == 4
    assert "".join(shown["examples"]["5"]["pieces"]) == Letters().decode(real)
    unlike = [Tokens(5, np.zeros((2, 3)), np.zeros(2))]
    payload, shown = read(scores.report(tmp_path / "r.html", train=data, tokens=unlike))
    assert any(
        "per-token scores of 1 examples are not shown" in n for n in payload["overview"]["notes"]
    )
    for wrong in (
        Tokens(9, np.zeros((2, 4)), np.zeros(2)),
        Tokens(1, np.zeros((3, 4)), np.zeros(3)),
    ):
        with pytest.raises(ValueError, match=r"do not belong to these scores \(2 queries\)"):
            scores.report(tmp_path / "r.html", train=data, tokens=[wrong])


def test_many_examples_are_cut_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "BUDGET", 2000)
    monkeypatch.setattr(page, "QUERIES", 3)
    values = np.random.default_rng(0).standard_normal((4, 300))
    train = [f"text {k} " + "x" * 100 for k in range(300)]
    scores = made(values, train_ids=np.arange(300), stage=["all"] * 300)
    payload, shown = read(scores.report(tmp_path / "r.html", train={"all": train}))
    notes = payload["overview"]["notes"]
    assert any("shown only by their index" in note for note in notes)
    assert any("The first 3 of 4 queries are shown" in note for note in notes)
    assert len(payload["queries"]) == 3
    worst = [str(e["column"]) for e in payload["harmful"]["entries"]]
    assert worst[0] in shown["examples"]  # the list over all queries comes first
    assert not shown["examples"].keys() & shown["ids"].keys()
    assert all(ids == [int(column), "all"] for column, ids in shown["ids"].items())


def test_the_policy_allows_what_is_there_and_nothing_else(tmp_path: Path) -> None:
    import hashlib

    text = made([[1.0, -1.0]]).report(tmp_path / "r.html", train=["a", "b"]).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    inline = re.findall(r"<script>(.*?)</script>", text, re.S)
    inline += re.findall(r"<style>(.*?)</style>", text, re.S)
    assert len(inline) == 3
    for part in inline:
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    outside = re.sub(r"<script.*?</script>|<style>.*?</style>", "", text, flags=re.S)
    assert "http:" not in outside and "https:" not in outside


# -- data that is not what the scores are about ----------------------------------------------------


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def test_data_of_another_length_or_order_is_refused(
    study: whence.Study, scores: whence.Scores, tmp_path: Path
) -> None:
    train = study.train["train"]
    assert check_data(scores, train, QUERY) == []
    swapped = Subset(train, [1, 0, *range(2, 20)])
    for wrong, message in (
        (
            Subset(train, range(19)),
            "the training data has 19 examples, but the scores are of 20",
        ),
        (
            models.vectors(21),
            "has 21 examples, but the scores are of 20 examples: give the data",
        ),
        (
            swapped,
            "the training data is not what the scores were computed from: its content or order",
        ),
        ([], "train.* is empty|the training data is empty"),
        (Endless(), "must be a map-style dataset"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            scores.report(tmp_path / "r.html", train=wrong, query=QUERY)
    with pytest.raises(ValueError, match="the query data has 4 examples"):
        scores.report(tmp_path / "r.html", query=Subset(QUERY, range(4)))
    with pytest.raises(
        ValueError, match="the query data is not what the scores were computed from"
    ):
        scores.report(tmp_path / "r.html", query=Subset(QUERY, [1, 0, 2, 3, 4]))
    assert not (tmp_path / "r.html").exists()
    # the same content in another dataset is the same data
    assert check_data(scores, TensorDataset(*train.tensors), QUERY) == []
    path = scores.report(tmp_path / "r.html", train=swapped, query=QUERY, check=False)
    notes = read(path)[0]["overview"]["notes"]
    assert any("training data were not checked (check=False)" in note for note in notes)


def test_random_data_is_named_as_such(scores: whence.Scores) -> None:
    class Augmented(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return torch.rand(4), 0

    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match=r"it is random \(augmented\?\)"),
    ):
        warnings.simplefilter("ignore")
        check_data(scores, Augmented(range(20)))


def test_every_method_keeps_fingerprints(study: whence.Study, tmp_path: Path) -> None:
    train = study.train["train"]
    swapped = Subset(train, [1, 0, *range(2, 20)])
    store = whence.GradientStore.build(
        study, tmp_path / "store", dimension=16, methods=["tracin"], progress=False
    )
    found = [
        whence.TracIn().attribute(study, QUERY, **QUIET),
        whence.RepSim().attribute(study, QUERY, **QUIET),
        whence.Random(0).attribute(study, QUERY),
        store.tracin(QUERY),
    ]
    for scores in found:
        scores.save(tmp_path / "saved")
        scores = whence.Scores.load(tmp_path / "saved")
        assert check_data(scores, train, QUERY) == [], scores.method
        with pytest.raises(ValueError, match="is not what the scores were computed from"):
            check_data(scores, swapped, QUERY)


def test_what_could_not_be_checked_is_said(study: whence.Study) -> None:
    (unknown,) = check_data(made([[1.0, 2.0]]), ["a", "b"])
    assert "the scores have no fingerprint" in unknown
    collated = whence.Study(
        study.model,
        whence.Classification(),
        train=study.train["train"],
        runs=study.runs,
        collate=torch.utils.data.default_collate,
    )
    scores = whence.Random(0).attribute(collated, QUERY)
    said = check_data(scores, collated.train["train"], QUERY)
    assert len(said) == 2 and "collate function must be the study's (none was given" in said[0]
    assert check_data(scores, collated.train["train"], QUERY, collate=collated.collate) == []


def test_paths_and_queries_that_are_wrong(scores: whence.Scores, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot be written: no folder .*nowhere"):
        scores.report(tmp_path / "nowhere" / "r.html")
    with pytest.raises(FileNotFoundError, match="is a folder: give a file in a folder that exists"):
        scores.report(tmp_path)
    with pytest.raises(IndexError, match=r"query=7 is out of range: .* queries 0\.\.4"):
        scores.report(tmp_path / "r.html", queries=[0, 7])
    with pytest.raises(ValueError, match="k=0: show at least one"):
        scores.report(tmp_path / "r.html", k=0)
    payload, _ = read(scores.report(tmp_path / "r.html", queries=[4, 2, 4]))
    assert [view["row"] for view in payload["queries"]] == [4, 2]


# -- strange texts ---------------------------------------------------------------------------------


EVIL = "</script><script>alert(1)</script><!-- <b>&amp; \u202e \u2028 ]]>"


def test_evil_texts_stay_texts(tmp_path: Path) -> None:
    scores = made([[1.0, -1.0]], method=EVIL, unit=EVIL, settings={EVIL: EVIL})
    path = scores.report(
        tmp_path / "r.html",
        train=[(EVIL, EVIL), ({EVIL: EVIL, "b": EVIL}, 0)],
        query=[(EVIL, 0)],
        classes=[EVIL],
        title=EVIL,
    )
    payload, shown = read(path)
    assert shown["examples"]["0"]["text"] == EVIL and payload["queries"][0]["label"] == EVIL
    text = path.read_text("utf-8")
    assert "<script>alert" not in text and "<!--" not in text and html.escape(EVIL) in text
    assert text.count("</script>") == 4


# -- notebooks -------------------------------------------------------------------------------------


def test_lone_surrogates_are_replaced_wherever_they_are(tmp_path: Path) -> None:
    lone, html = "x\ud800", HTML("<b>\ud800</b>")
    scores = made([[1.0, -1.0]], settings={lone: lone}, stage=[lone] * 2)
    train = {lone: [(lone, 0)] * 2}
    path = scores.report(tmp_path / "r.html", train=train, title=lone, classes=[lone])
    assert read(path)[0]["title"] == "x?" and read(path)[1]["examples"]["0"]["label"] == "x?"
    path = scores.report(path, train=train, renderer=lambda _: html)
    assert read(path)[1]["examples"]["0"]["html"] == "<b>?</b>"


def test_results_are_tables_in_a_notebook(study: whence.Study, scores: whence.Scores) -> None:
    shown = scores._repr_html_()
    assert (
        "<table>" in shown and "Scores by Source.published(" in shown and "5 queries x 20" in shown
    )
    assert repr(scores).startswith("Scores by Source.published(")
    assert "higher is better" in repr(scores)
    assert "<b>" not in made([[1.0]], unit="<b>")._repr_html_()
    assert "<table>" in scores.helpful(0, 2)._repr_html_()
    shown = study._repr_html_()
    assert "parameters" in shown and "20 examples" in shown and "Classification" in shown
    top = whence.Scores(
        None,
        method="M",
        measurement="m",
        unit="u",
        higher_is_better=True,
        train_ids=[0, 1],
        top=Top(np.zeros((2, 1, 1)), np.zeros((2, 1, 1), np.int64)),
    )
    assert "only the top 1" in top._repr_html_()


def test_bars_work_in_a_notebook_without_ipywidgets() -> None:
    """A kernel in all that tqdm looks at, and no ipywidgets: bars are drawn as text."""
    code = """
import sys, types
class Shell:
    config = {"IPKernelApp": {}}
kernel = types.ModuleType("IPython")
kernel.get_ipython = lambda: Shell()
sys.modules["IPython"] = kernel
for name in ("ipywidgets", "IPython.html.widgets", "IPython.html"):
    sys.modules[name] = None
from whence.progress import progress_bar
list(progress_bar(range(3), desc="scores", shown=True))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "scores:   0%" in done.stderr and "0/3" in done.stderr  # and then removed


def test_a_notebook_shows_the_page_and_not_its_path(scores: whence.Scores, tmp_path: Path) -> None:
    path = scores.report(tmp_path / "a <b>.html")
    assert path == tmp_path / "a <b>.html" and path.exists()
    shown = path._repr_html_()
    assert shown.startswith("<iframe src=") and "<b>" not in shown


def test_one_query_in_a_notebook(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    train = [(f"{evil} {k}", k % 2) for k in range(6)]
    scores = made(np.random.default_rng(0).standard_normal((2, 6)).tolist())
    study = types.SimpleNamespace(train=train, collate=None, tasks={}, stages=["train"])
    shown = scores.show(1, k=2, study=study, check=False, classes=["<b>no</b>", "yes"])
    page, best = shown._repr_html_(), scores.helpful(1, 1)[0].example
    assert f"#{best}<" in page and page.count("border:1px") == 4
    assert "<img" not in page and "&lt;img" in page and "<b>no</b>" not in page
    assert repr(shown).count(f"{best:>10}  ") == 1 and "most harmful" in repr(shown)
    pictures = TensorDataset(torch.rand(6, 1, 8, 8), torch.arange(6))
    study = types.SimpleNamespace(train=pictures, collate=None, tasks={}, stages=["train"])
    assert 'src="data:image/png' in scores.show(0, study=study, check=False)._repr_html_()
