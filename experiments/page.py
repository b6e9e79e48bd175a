"""docs/reproduce.md and its figures, from experiments/results/. Nothing on it is typed by hand.

    python -m experiments.page [--no-figures]

Images of examples are drawn from the datasets ($WHENCE_DATA, see `experiments.data`), and texts are
copied into results/texts/ from there; where a dataset is not there, what was made before stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from whence.persist.files import write_json

from . import claims, data, figures, tables
from .claims import ABSENT, CLAIMS, FAILS, HOLDS, OPEN, Verdict
from .tables import Found, so_many, title
from .tasks import RESULTS, TASKS, WHOLE, Experiment

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent / "docs"
PICTURES = "figures/reproduce"  # below the pages
NEAR = 0.05  # how far from one of the reference numbers is still near
LETTERS = 240  # of a text in a panel
CALLED = {"SST-2": ("negative", "positive")}  # labels that are numbers in the files
FORMS = {  # of SOURCE for Adam
    "SOURCE, λP⁻¹": 'with appendix C\'s λP⁻¹ (`Source(damping="preconditioner")`) in place of its '
    "inverse at 1e-8",
    figures.EXACT_FORM: "with the whole of appendix C (`Source(exact=True)`)",
}
MARKS = {HOLDS: "✓", FAILS: "✗", OPEN: "?", ABSENT: "…"}
NEEDS = {  # one of these files, to draw a task's examples
    "fashion_mnist": ("fashion_mnist/fashion_mnist.npz",),
    "rotated_mnist": ("mnist/mnist.npz",),
    "cifar10": ("cifar10/cifar10.npz", "cifar10/cifar10_subset.npz"),
    "pacs": ("pacs/pacs_64.npz",),
    "rte": ("glue/RTE/train.tsv",),
    "sst2": ("glue/SST-2/train.tsv",),
    "qnli": ("glue/QNLI/dev.tsv",),
    "wikitext2": ("wikitext2/wiki.train.raw", "wikitext2/wikitext103vocab.train_part.txt"),
}

Results = Mapping[str, Found]


@dataclass(frozen=True)
class Plate:
    """A figure of the page, from the results.

    Attributes:
        draw: from all results and the tasks that it shows.
        of: whether a task is to be on it.
        has: whether a task's result has what it shows.
        shows: what one sees, for those who do not see it.
    """

    draw: Callable[[Results, Sequence[str]], Figure]
    of: Callable[[Experiment], bool]
    has: Callable[[Found], bool]
    shows: str

    def tasks(self, results: Results) -> list[str]:
        return [t for t in results if self.of(TASKS[t]) and self.has(results[t])]


def _judged(found: Found) -> bool:
    return bool(found["lds"])


PLATES = {
    "lds-converged": Plate(
        figures.lds_bars,
        lambda e: e.group == "converged",
        _judged,
        "bars of the LDS by method, one model beside the ensemble, a panel for each task",
    ),
    "lds-other": Plate(
        figures.lds_bars,
        lambda e: e.group in claims.HARD,
        _judged,
        "bars of the LDS by method, one model beside the ensemble, a panel for each task",
    ),
    "over-alpha": Plate(
        lambda results, shown: figures.over(results, shown, "alpha"),
        lambda e: bool(e.full.alphas),
        lambda found: bool(found.get("alpha")),
        "LDS by method over the share of the data in a subset",
    ),
    "fastsource": Plate(
        figures.average_bars,
        lambda e: "FastSource" in e.methods and e.group != "not in the paper",
        lambda found: set(figures.AVERAGED) <= set(found["lds"]),
        "bars of the LDS of influence functions, FastSource and SOURCE, by task",
    ),
    "over-epochs": Plate(
        lambda results, shown: figures.over(results, shown, "epochs"),
        lambda e: bool(e.full.epochs),
        lambda found: bool(found.get("epochs")),
        "LDS by method over the number of epochs",
    ),
    "optimum": Plate(
        lambda results, shown: figures.over(results, shown, "optimum"),
        lambda e: bool(e.full.epochs),
        lambda found: bool(found.get("optimum")),
        "LDS of influence functions at the optimum over the share of the data in a subset",
    ),
    "removal": Plate(
        figures.removal,
        lambda e: e.full.removal is not None,
        lambda found: bool(found.get("removal")),
        "share of queries flipped over the number of examples removed, by method",
    ),
}


# --- words and tables ---------------------------------------------------------------------------


def plain(text: str, most: int | None = None) -> str:
    """Text from elsewhere as nothing but text, in Markdown, tables and HTML; cut after so many."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if most is not None and len(line) > most:
        line = line[:most].rstrip() + " …"
    return "".join(c if c.isalnum() or c in " ,;…" else f"&#{ord(c)};" for c in line)


def columns(heads: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> str:
    """A Markdown table of finished cells; `right` has an "r" for each column of numbers."""
    rules = ["---:" if k < len(right) and right[k] == "r" else "---" for k in range(len(heads))]
    lines = [heads, rules, *(["–" if c is None else str(c) for c in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def sizes(found: Found) -> Mapping[str, int]:
    """M, R, queries and models of the methods of the paper."""
    of: Mapping[str, int] = max(
        (entry["of"] for entry in found["lds"].values()), key=lambda of: of["runs"]
    )
    return of


def listed(names: Iterable[str]) -> str:
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last


def missing(plate: Plate, results: Results) -> str:
    """Which tasks a figure does not have yet."""
    shown = plate.tasks(results)
    names = [title(t) for t, e in TASKS.items() if plate.of(e) and t not in shown]
    return f"*Not run yet: {listed(names)}.*" if names else ""


# --- parts of the page --------------------------------------------------------------------------


def figure(name: str, results: Results) -> str:
    plate, parts = PLATES[name], []
    shown = plate.tasks(results)
    if shown:
        told = listed(title(t, results[t]) for t in shown)
        parts.append(f"![{plate.shows}: {told}]({PICTURES}/{name}.png)")
    return "\n\n".join([*parts, *filter(None, [missing(plate, results)])])


def compared(results: Results, reference: Mapping[str, Any]) -> str:
    """FashionMNIST beside the reference numbers: how far, and in which order."""
    if "fashion_mnist" not in results:
        return "*Not run yet.*"
    found, experiment = results["fashion_mnist"], TASKS["fashion_mnist"]
    known = reference["fashion_mnist"]
    setups = {"single": "one model", "ensemble": "ensemble"}
    names = list(dict.fromkeys(n for ref in known.values() for s in setups for n in ref[s]))
    names.sort(key=lambda n: -max(ref["ensemble"].get(n, [0])[0] for ref in known.values()))
    rows, far, absent, count = [], [], [], 0
    for name in names:
        entry = found["lds"].get(name, {})
        models = entry["of"]["runs"] if entry else 0
        few = "" if models in (0, sizes(found)["runs"]) else f" ({so_many(models, 'model')})"
        row: list[object] = [tables.label(name, experiment) + few]
        for setup, word in setups.items():
            own = entry.get(setup)
            refs = [ref[setup].get(name) for ref in known.values()]
            row += [tables.shown(own), *(_reference(r) for r in refs)]
            there = [r[0] for r in refs if r]
            nearest = min(there, key=lambda v: abs(v - own[0])) if own and there else None
            off = round(own[0] - nearest, 3) + 0.0 if own and nearest is not None else None
            row.append(None if off is None else f"{off:+.3f}")
            count += off is not None
            if off is not None and abs(off) > NEAR:
                far.append(f"{tables.label(name, experiment)}, {word} ({off:+.3f})")
            if own is None and there:
                absent.append(f"{tables.label(name, experiment)}, {word}")
        rows.append(row)
    heads = ["method"]
    for word in setups.values():
        heads += [f"{word}: here", "paper", "indep.", "off by"]
    parts = [columns(heads, rows, " " + "r" * 8)]
    ceiling, theirs = next(iter(found["lds"].values()))["ceiling"], known["independent"]["ceiling"]
    if found["quick"]:
        parts.append("These are numbers of the quick version, which is another, smaller task.")
    told = "unknown" if ceiling is None else f"{ceiling:.2f}"
    words = (
        f"*off by*: from the nearer of the two. Noise ceiling here {told}, of the "
        f"independent implementation {theirs:.2f}. The numbers of the paper: "
        f"{known['paper']['source']}. The independent ones: {known['independent']['source']}."
    )
    parts.append(words)
    near = (
        f"All {count} numbers that there are lie within {NEAR:g} of one of the two."
        if not far
        else f"**Not within {NEAR:g} of either: {'; '.join(far)}.** The other "
        f"{count - len(far)} are."
    )
    parts.append(f"- {near}" + (f" Not run yet: {'; '.join(absent)}." if absent else ""))
    for who, ref in known.items():
        for setup, word in setups.items():
            parts[-1] += f"\n- {_order(found, experiment, ref[setup], setup, who, word)}"
    return "\n\n".join(parts)


def _reference(value: Sequence[float] | None) -> str | None:
    if value is None:
        return None
    return f"{value[0]:.2f}" + (f" ± {value[1]:.2f}" if len(value) > 1 else "")


def _order(
    found: Found,
    experiment: Experiment,
    ref: Mapping[str, Sequence[float]],
    setup: str,
    who: str,
    word: str,
) -> str:
    """Whether methods stand in the same order as in a reference; which pairs do not."""
    own = {n: found["lds"][n][setup] for n in ref if found["lds"].get(n, {}).get(setup)}
    swapped = []
    for high, low in itertools.permutations(own, 2):
        if ref[high][0] > ref[low][0] and own[high][0] < own[low][0]:
            apart = own[high][2] < own[low][1]
            names = (tables.label(low, experiment), tables.label(high, experiment))
            swapped.append(
                f"{names[0]} before {names[1]}" + ("" if apart else " (intervals overlap)")
            )
    kept = f"Order of the {len(own)} methods as in the {who}'s, {word}"
    if who == "independent":
        kept = f"Order of the {len(own)} methods as in the independent implementation's, {word}"
    if len(own) < 2:
        return f"{kept}: not run yet."
    return f"{kept}: kept." if not swapped else f"{kept}: **not kept**: {'; '.join(swapped)}."


def claims_part(results: Results) -> str:
    """The claims, a mark for each task, and the numbers of those that do not hold."""
    judged = claims.judged(results)
    numbered = "\n".join(
        f"{k}. {claim.text[0].upper()}{claim.text[1:]}." for k, claim in enumerate(CLAIMS, 1)
    )
    rows = [
        [title(t, results.get(t)), *(_mark(v) for v in verdicts)] for t, verdicts in judged.items()
    ]
    heads = ["task", *(str(k) for k in range(1, len(CLAIMS) + 1))]
    counts = counted(judged)
    done = sum(counts.values()) - counts[ABSENT]
    legend = (
        f"✓ holds, **✗** does not hold, ? not decided (neither is above for sure), … not run yet, "
        f"empty: not claimed. Of {sum(counts.values())} claims {done} were judged: "
        f"**{counts[HOLDS]} hold, {counts[FAILS]} do not, {counts[OPEN]} are not decided.**"
    )
    parts = [numbered, columns(heads, rows), legend]
    for word, head in ((FAILS, "Does not hold"), (OPEN, "Not decided")):
        lines = [
            f"- {title(t, results.get(t))}, claim {k}: {verdict.why}"
            for k in range(1, len(CLAIMS) + 1)
            for t, verdicts in judged.items()
            if (verdict := verdicts[k - 1]) is not None and verdict.word == word
        ]
        if lines:
            parts.append(f"{head}, by claim:\n\n" + "\n".join(lines))
        if word == FAILS:
            parts += causes(results, [t for t, v in judged.items() if v[0] and v[0].word == FAILS])
    return "\n\n".join(parts)


def causes(results: Results, tasks: Iterable[str]) -> list[str]:
    """What other methods' results say of why SOURCE is not first on these tasks."""
    lines = []
    for task in tasks:
        found, experiment = results[task], TASKS[task]
        entry, theirs = (found["lds"][n] for n in (experiment.source, "influence"))
        whole = found["lds"].get(WHOLE)
        if whole and whole["of"] == entry["of"] and whole["single"][0] < theirs["single"][0]:
            lines.append(
                f"- {title(task, found)}: with the whole Gauss-Newton matrix in place of EK-FAC "
                f"SOURCE has {tables.shown(whole['single'])}: how curvature is approximated does "
                "not seem to be the cause."
            )
        output = results.get(f"{task}_output", {}).get("lds", {})
        if {experiment.source, "influence"} <= output.keys():
            mine, its = (output[n]["single"] for n in (experiment.source, "influence"))
            lines.append(
                f"- {title(task, found)}: asked about the output in place of its absolute error, "
                f"SOURCE has {tables.shown(mine)}, influence functions {tables.shown(its)}: which "
                "is above hangs on what is measured."
            )
        for form, words in FORMS.items():
            other = found["lds"].get(form, {}).get("single")
            apart = claims.difference(found, experiment.source, form)
            if other and (apart[0] < 0 if apart else other[0] > entry["single"][0]):
                told = f"SOURCE has {tables.shown(other)}"
                if apart:
                    above = tables.shown(claims.turned(apart))
                    models = tables.so_many(found["lds"][form]["of"]["runs"], "model")
                    told += f", by the same {models} {above} more"
                lines.append(f"- {title(task, found)}: {words}, {told}.")
    return ["What is known of why SOURCE is not first:\n\n" + "\n".join(lines)] if lines else []


def counted(judged: Mapping[str, Sequence[Verdict | None]]) -> dict[str, int]:
    """How many claims hold, and so on."""
    words = [v.word for verdicts in judged.values() for v in verdicts if v is not None]
    return {word: words.count(word) for word in MARKS}


def summary(results: Results) -> str:
    """What there is, in a line or two."""
    quick = [t for t in results if results[t]["quick"]]
    counts = counted(claims.judged(results))
    parts = [
        f"Of {len(TASKS)} tasks {len(results) - len(quick)} were run"
        + (f", {len(quick)} only in the quick version" if quick else "")
        + f". Of the paper's claims {counts[HOLDS]} hold, {counts[FAILS]} do not, "
        f"{counts[OPEN]} are not decided (neither is above for sure), "
        f"{counts[ABSENT]} wait for a run."
    ]
    left = {t: unfinished(found, TASKS[t]) for t, found in results.items()}
    begun = [f"{title(t, results[t])} ({'; '.join(what)})" for t, what in left.items() if what]
    if begun:
        parts.append(f"Not finished: {listed(begun)}.")
    return " ".join(parts)


def unfinished(found: Found, experiment: Experiment) -> list[str]:
    """What a task is to have, and its result has not yet."""
    scale = experiment.quick if found["quick"] else experiment.full
    names = [n for n in (*experiment.methods, *experiment.dear) if n not in found["lds"]]
    if scale.downsampled and "Downsampling" not in found["lds"]:
        names.append("Downsampling")
    few = [
        n
        for n in (*experiment.methods, *experiment.dear)
        if n in found["lds"] and found["lds"][n]["of"]["runs"] < scale.models(n)
    ]
    parts = {
        "other α": set(map(float, found.get("alpha", {}))) >= set(scale.alphas),
        "epochs": set(map(float, found.get("epochs", {}))) >= set(scale.epochs),
        "optimum": bool(found.get("optimum")) or not scale.epochs,
        "panels": bool(found.get("panels")) or not scale.panels,
        "removal": bool(found.get("removal")) or scale.removal is None,
    }
    names += [f"ensembles of {listed(few)}"] if few else []
    return names + [part for part, there in parts.items() if not there]


def _mark(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return f"**{MARKS[verdict.word]}**" if verdict.word == FAILS else MARKS[verdict.word]


def differences(found: Found, experiment: Experiment) -> list[str]:
    """All that is not as in the paper: what the task says, and what its sizes say."""
    parts = list(experiment.differs)
    if found["quick"]:
        parts.insert(0, "**quick: a smaller model, less data, a smaller evaluation**")
    if found.get("tracked"):
        parts.append(f"attributed by {found['tracked']}")
    if experiment.grid is not None and not any("grid search" in part for part in parts):
        parts.append("rate and weight decay found by grid search")
    of, paper = sizes(found), experiment.paper_seeds
    if of["subsets"] != 100:
        parts.append(f"M = {of['subsets']} (the paper: 100)")
    if paper is not None and of["seeds"] != paper:
        parts.append(f"R = {of['seeds']} (the paper: {paper})")
    if of["runs"] == 1:
        parts.append("one model only (the paper: ensembles of 10 too)")
    elif of["runs"] != 10:
        without = [n for n in experiment.methods if claims.value(found, n, "ensemble") is None]
        but = f", of all but {listed(without)}" if without else ""
        parts.append(f"ensembles of {of['runs']} (the paper: 10){but}")
    if found["tf32"]:
        parts.append("trained in TF32")
    rounded = {name: entry.get("tf32", False) for name, entry in found["lds"].items()}
    if any(rounded.values()):
        exact = [name for name, yes in rounded.items() if not yes]
        parts.append(f"attributed in TF32{f' (not {listed(exact)})' if exact else ''}")
    return parts


def settings(results: Results) -> str:
    """A row for each task: how much was done, and what differs."""
    rows: list[list[object]] = []
    for task, experiment in TASKS.items():
        found = results.get(task)
        paper = experiment.paper_seeds or "–"
        if found is None:
            differs = "; ".join(experiment.differs) or None
            rows.append([title(task), "*not\u00a0run\u00a0yet*", paper, None, None, None, differs])
            continue
        of = sizes(found)
        ceiling = next(iter(found["lds"].values()))["ceiling"]
        rows.append(
            [
                title(task, found),
                f"{of['subsets']}\u00a0×\u00a0{of['seeds']}",
                paper,
                of["queries"],
                of["runs"],
                None if ceiling is None else f"{ceiling:.2f}",
                "not in the paper"
                if experiment.group == "not in the paper"
                else "; ".join(differences(found, experiment)) or "nothing that we know of",
            ]
        )
    heads = ["task", "M × R", "paper's R", "queries", "models", "ceiling"]
    return columns([*heads, "what differs from the paper's setting"], rows, " rrrrr")


def numbers(results: Results) -> str:
    """Every task's setting, tables, machine and command."""
    parts = []
    for task, experiment in TASKS.items():
        found = results.get(task)
        parts.append(f"### {title(task, found)}")
        setting = f"{experiment.setting[0].upper()}{experiment.setting[1:]}."
        if found is None:
            quick = "" if not experiment.gpu else " (needs a GPU)"
            parts.append(f"{setting} *Not run yet:* `whence reproduce {task}`{quick}.")
            continue
        parts.append(f"A smaller version of: {setting}" if found["quick"] else setting)
        parts.append(tables.lds_table(found, experiment).markdown())
        for part, head in tables.PARTS.items():
            table = tables.over(found, part)
            if table is not None:
                parts += [f"{head}, one model:", table.markdown()]
        removed = tables.removal_table(found)
        if removed is not None:
            r = found["removal"]
            asked = f"Share of {r['queries']} queries flipped by removal"
            parts += [f"{asked} ({r['trainings']:,} trainings):", removed.markdown()]
        parts.append(tables.about(found))
    return "\n\n".join(parts)


def searches(folder: Path) -> str:
    """The grid searches: what was tried, and what was taken."""
    files = [folder / f"{task}.json" for task in TASKS]
    found = [json.loads(file.read_text()) for file in files if file.is_file()]
    if not found:
        return "*Not run yet.*"
    rows = []
    for r in found:
        best, tried = r["best"], []
        for decay in sorted({t["weight_decay"] for t in r["tried"]}):
            own = sorted(
                (t["rate"], t["validation"]) for t in r["tried"] if t["weight_decay"] == decay
            )
            found_by_rate = ", ".join(
                f"{rate:g}: " + ("diverged" if value is None else f"{value:.3f}")
                for rate, value in own
            )
            tried.append(f"*{decay:g}*: {found_by_rate}")
        m = r["machine"]
        rows.append(
            [
                title(r["task"]),
                f"{best['rate']:g}",
                f"{best['weight_decay']:g}",
                f"{r['by']} {best['validation']:.3f}",
                r["settings"]["seeds"],
                "<br>".join(tried),
                f"{r['device']}, torch {m['torch']}, {m['date']}",
            ]
        )
    heads = ["task", "rate", "weight decay", "held-out", "seeds", "all that was tried", "made by"]
    return columns(heads, rows, " rrrr")


def rounding(file: Path) -> str:
    """What TF32 does to scores, by `experiments.rounding`."""
    if not file.is_file():
        return "*Not measured yet.*"
    r = json.loads(file.read_text())
    rows = [
        [title(task), name, f"{own['median']:.3f}", f"{own['least']:.3f}"]
        for task, found in r["tasks"].items()
        for name, own in found.items()
    ]
    table = columns(["task", "method", "median query", "least"], rows, "  rr")
    m = r["machine"]
    return f"{table}\n\n{r['queries']} queries. {r['device']}, torch {m['torch']}, {m['date']}."


# --- panels of examples -------------------------------------------------------------------------


def here(task: str) -> bool:
    """Whether a task's dataset is on this machine. Nothing is downloaded for a page."""
    return any((root / file).is_file() for root in data.roots() for file in NEEDS[task])


def with_panels(examples: Results, kind: str) -> list[str]:
    return [task for task in examples if TASKS[task].panel == kind]


def _models(found: Found) -> str:
    """Those that a panel is of."""
    return so_many(found["panels"]["of"]["runs"], "model")


def image_panels(examples: Results, docs: Path) -> str:
    parts = []
    for task in with_panels(examples, "image"):
        name, head = f"{PICTURES}/examples-{task}.png", title(task, examples[task])
        if (docs / name).is_file():
            by = f"**{head}**, by the mean scores of {_models(examples[task])}:"
            alt = f"{head}: the most helpful and most harmful training images of a few queries"
            parts.append(f"{by}\n\n![{alt}]({name})")
        else:
            parts.append(f"**{head}**: *not drawn, for want of the images.*")
    return "\n\n".join(parts) or "*Not run yet.*"


def shown_texts(found: Found) -> list[dict[str, list[int]]]:
    """Of each query in a panel of texts, the most helpful and most harmful example by method."""
    kept: Mapping[str, Any] = found["panels"]["methods"]
    return [
        {name: [rows[k]["helpful"][0], rows[k]["harmful"][0]] for name, rows in kept.items()}
        for k in range(min(figures.QUERIES, *map(len, kept.values())))
    ]


def texts_of(found: Found, experiment: Experiment) -> dict[str, Any]:
    """The texts of a panel: {"train" or "query": {index: text}}."""
    if experiment.name == "wikitext2":
        train, query = data.wikitext2_texts()
    else:
        name, _, count = experiment.make.args  # type: ignore[attr-defined]
        classes = CALLED.get(name, data.GLUE[name][1])
        train, query = (
            [f"{classes[y].replace('_', ' ')}: {' / '.join(t)}" for t, y in zip(*own, strict=True)]
            for own in data._glue(name, 160 if found["quick"] else count)
        )
    shown = shown_texts(found)
    return {
        "recipe": found["recipe"],
        "query": {str(k): query[k][: 3 * LETTERS] for k in range(len(shown))},
        "train": {str(k): train[k][: 2 * LETTERS] for k in sorted(_examples(shown))},
    }


def _examples(shown: list[dict[str, list[int]]]) -> set[int]:
    return {example for by_method in shown for pair in by_method.values() for example in pair}


def text_panels(examples: Results, folder: Path) -> str:
    parts = []
    for task in with_panels(examples, "text"):
        found, file = examples[task], folder / "texts" / f"{task}.json"
        kept = json.loads(file.read_text()) if file.is_file() else {}
        shown = shown_texts(found)
        wanted = set(map(str, _examples(shown)))
        parts.append(f"**{title(task, found)}**, by the mean scores of {_models(found)}:")
        if kept.get("recipe") != found["recipe"] or not wanted <= set(kept["train"]):
            parts.append("*not shown, for want of the texts.*")
            continue
        for k, by_method in enumerate(shown):
            rows = [
                [name, *(plain(kept["train"][str(e)], LETTERS) for e in pair)]
                for name, pair in by_method.items()
            ]
            parts.append(f"*Query*: {plain(kept['query'][str(k)], 2 * LETTERS)}")
            parts.append(columns(["method", "most helpful", "most harmful"], rows))
    return "\n\n".join(parts) or "*Texts: not run yet.*"


# --- the page -----------------------------------------------------------------------------------


def text(folder: Path = RESULTS, docs: Path = DOCS) -> str:
    """The page, of the results in a folder; images of examples as they lie below `docs`."""
    results, examples = tables.read(folder), tables.read(folder, "panels")
    file = folder / "reference.json"
    reference = json.loads((file if file.is_file() else RESULTS / "reference.json").read_text())
    parts: dict[str, Callable[[], str]] = {
        "summary": lambda: summary(results),
        "compared": lambda: compared(results, reference),
        "claims": lambda: claims_part(results),
        **{f"figure {name}": partial(figure, name, results) for name in PLATES},
        "images": lambda: image_panels(examples, docs),
        "texts": lambda: text_panels(examples, folder),
        "settings": lambda: settings(results),
        "rounding": lambda: rounding(folder / "rounding.json"),
        "numbers": lambda: numbers(results),
        "searches": lambda: searches(folder / "search"),
    }
    page = (FOLDER / "reproduce.template.md").read_text()
    for name, make in parts.items():
        mark = f"<!-- {name} -->"
        if page.count(mark) != 1:
            raise ValueError(f"reproduce.template.md has {mark} {page.count(mark)} times, not once")
        page = page.replace(mark, make())
    return page


def draw(folder: Path = RESULTS, docs: Path = DOCS) -> list[str]:
    """All figures that the results have, and the texts of panels; the names of the files."""
    results, examples, made = tables.read(folder), tables.read(folder, "panels"), []

    def keep(name: str, drawn: Figure) -> None:
        figures.save(drawn, docs / PICTURES / f"{name}.png")
        made.append(f"{name}.png")

    for name, plate in PLATES.items():
        shown = plate.tasks(results)
        if shown:
            keep(name, plate.draw(results, shown))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep("unrolling", figures.unrolling(figures.two_weights()))
    for task in filter(here, with_panels(examples, "image")):
        experiment = TASKS[task]
        recipe, held = experiment.recipe(examples[task]["quick"])
        train: Any = recipe.stage(experiment.stage).data.dataset
        keep(f"examples-{task}", figures.examples(examples[task], experiment, train, held))
    for task in filter(here, with_panels(examples, "text")):
        (folder / "texts").mkdir(exist_ok=True)
        write_json(folder / "texts" / f"{task}.json", texts_of(examples[task], TASKS[task]))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-figures", action="store_true", help="the text alone")
    options = parser.parse_args()
    if not options.no_figures:
        for name in draw():
            print(f"docs/{PICTURES}/{name}")
    (DOCS / "reproduce.md").write_text(text())
    print("docs/reproduce.md")


if __name__ == "__main__":
    main()
