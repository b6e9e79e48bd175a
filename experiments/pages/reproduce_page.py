"""docs/reproduce.md, reproduce-numbers.md, negative.md and their figures, from the results.

    python -m experiments.pages.reproduce_page [--no-figures]

Images of examples are drawn from the datasets ($WHENCE_DATA, see `experiments.tasks.data`), and
texts are copied from there into results/texts/. Where a dataset is missing, the earlier file stays.
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

from experiments.pages import (
    claims,
    figures,
    negative_page,
    numbers_page,
    ours,
    panels,
    tables,
    two_weights,
)
from experiments.pages.claims import ABSENT, CLAIMS, FAILS, HOLDS, OPEN, Verdict
from experiments.pages.markdown import DOCS, filled, listed, table
from experiments.pages.tables import Result, counted, label, title, with_interval
from experiments.tasks import RESULTS, TASKS, Experiment
from experiments.tasks.methods import ARGUMENTS, GAUSS_NEWTON
from whence.persist.files import write_json

NEAR = 0.05  # how far from one of the reference numbers still counts as near
ADAM_FORMS = {
    "SOURCE, exact": f"with all of appendix C (`Source({ARGUMENTS['SOURCE, exact']})`)",
}
OURS_FIGURE = "ours"
MARKS = {HOLDS: "✓", FAILS: "✗", OPEN: "?", ABSENT: "…"}

Results = Mapping[str, Result]


@dataclass(frozen=True)
class Plot:
    """A figure of the page, from the results.

    Attributes:
        draw: draws it, from all results and the tasks to show.
        includes: whether a task should be on it.
        has_data: whether a task's result has the numbers for it.
        alt: the figure in words.
    """

    draw: Callable[[Results, Sequence[str]], Figure]
    includes: Callable[[Experiment], bool]
    has_data: Callable[[Result], bool]
    alt: str

    def tasks(self, results: Results) -> list[str]:
        return [t for t in results if self.includes(TASKS[t]) and self.has_data(results[t])]


PLOTS = {
    "lds-converged": Plot(
        figures.lds_bars,
        lambda e: e.group == "converged",
        lambda result: bool(result["lds"]),
        "bars of the LDS by method, one model next to the ensemble, a panel for each task",
    ),
    "lds-other": Plot(
        figures.lds_bars,
        lambda e: e.group in claims.NOT_CONVERGED_OR_STAGED,
        lambda result: bool(result["lds"]),
        "bars of the LDS by method, one model next to the ensemble, a panel for each task",
    ),
    "over-alpha": Plot(
        lambda results, tasks: figures.over(results, tasks, "alpha"),
        lambda e: bool(e.full.alphas),
        lambda result: bool(result.get("alpha")),
        "LDS by method over the share of the data in a subset",
    ),
    "fastsource": Plot(
        figures.average_bars,
        lambda e: "FastSource" in e.methods and e.group != "not in the paper",
        lambda result: set(figures.AVERAGED) <= set(result["lds"]),
        "bars of the LDS of influence functions, FastSource and SOURCE, by task",
    ),
    "over-epochs": Plot(
        lambda results, tasks: figures.over(results, tasks, "epochs"),
        lambda e: bool(e.full.epochs),
        lambda result: bool(result.get("epochs")),
        "LDS by method over the number of epochs",
    ),
    "optimum": Plot(
        lambda results, tasks: figures.over(results, tasks, "optimum"),
        lambda e: bool(e.full.epochs),
        lambda result: bool(result.get("optimum")),
        "LDS of influence functions at the optimum over the share of the data in a subset",
    ),
    "removal": Plot(
        figures.removal,
        lambda e: e.full.removal is not None,
        lambda result: bool(result.get("removal")),
        "share of queries flipped over the number of examples removed, by method",
    ),
}


# --- parts of the page --------------------------------------------------------------------------


def summary(results: Results) -> str:
    """Which tasks were run, and how many claims hold."""
    quick = [t for t in results if results[t]["quick"]]
    counts = count_verdicts(claims.verdicts_by_task(results))
    parts = [
        f"{len(results) - len(quick)} of {len(TASKS)} tasks were run"
        + (f", {len(quick)} only in the quick version" if quick else "")
        + f". Of the paper's claims, {counts[HOLDS]} hold, {counts[FAILS]} do not, "
        f"{counts[OPEN]} are undecided (the intervals do not separate the methods), "
        f"{counts[ABSENT]} are not run yet."
    ]
    missing = {t: unfinished(result, TASKS[t]) for t, result in results.items()}
    begun = [f"{title(t, results[t])} ({'; '.join(what)})" for t, what in missing.items() if what]
    if begun:
        parts.append(f"Not finished: {listed(begun)}.")
    return " ".join(parts)


def unfinished(result: Result, experiment: Experiment) -> list[str]:
    """The parts of a task's evaluation that its result does not have yet."""
    scale = experiment.quick if result["quick"] else experiment.full
    methods = (*experiment.methods, *experiment.expensive)
    names = [n for n in methods if n not in result["lds"]]
    if scale.downsampled and "Downsampling" not in result["lds"]:
        names.append("Downsampling")
    few = [
        n
        for n in methods
        if n in result["lds"] and result["lds"][n]["of"]["runs"] < scale.models(n)
    ]
    complete = {
        "other α": set(map(float, result.get("alpha", {}))) >= set(scale.alphas),
        "epochs": set(map(float, result.get("epochs", {}))) >= set(scale.epochs),
        "optimum": bool(result.get("optimum")) or not scale.epochs,
        "panels": bool(result.get("panels")) or not scale.panels,
        "removal": bool(result.get("removal")) or scale.removal is None,
    }
    names += [f"ensembles of {listed(few)}"] if few else []
    return names + [part for part, there in complete.items() if not there]


def figure(name: str, results: Results) -> str:
    """A figure, and the tasks that it lacks."""
    plot, parts = PLOTS[name], []
    tasks = plot.tasks(results)
    if tasks:
        names = listed(title(t, results[t]) for t in tasks)
        parts.append(f"![{plot.alt}: {names}]({figures.FOLDER}/{name}.png)")
    missing = [title(t) for t, e in TASKS.items() if plot.includes(e) and t not in tasks]
    if missing:
        parts.append(f"*Not run yet: {listed(missing)}.*")
    return "\n\n".join(parts)


def ours_part(results: Mapping[str, Sequence[ours.Entry]]) -> str:
    """Our defaults beside the paper's forms: sentences, figure and table."""
    parts = [ours.sentences(results)]
    if results:
        names = listed(title(task) for task in results)
        alt = f"LDS of the published forms and of ours, by task: {names}"
        parts.append(f"![{alt}]({figures.FOLDER}/{OURS_FIGURE}.png)")
    return "\n\n".join([*parts, ours.main_table(results)])


def compared(results: Results, reference: Mapping[str, Any]) -> str:
    """FashionMNIST next to the reference numbers: distances, and whether the order is the same."""
    if "fashion_mnist" not in results:
        return "*Not run yet.*"
    result, experiment = results["fashion_mnist"], TASKS["fashion_mnist"]
    references = reference["fashion_mnist"]
    setups = {"single": "one model", "ensemble": "ensemble"}
    names = list(dict.fromkeys(n for ref in references.values() for s in setups for n in ref[s]))
    names.sort(key=lambda n: -max(ref["ensemble"].get(n, [0])[0] for ref in references.values()))
    rows, far, absent, count = [], [], [], 0
    for name in names:
        entry = result["lds"].get(name, {})
        models = entry["of"]["runs"] if entry else 0
        usual = models in (0, numbers_page.sizes(result)["runs"])
        row: list[object] = [
            label(name, experiment) + ("" if usual else f" ({counted(models, 'model')})")
        ]
        for setup, word in setups.items():
            value = entry.get(setup)
            refs = [ref[setup].get(name) for ref in references.values()]
            row += [with_interval(value), *(_reference(r) for r in refs)]
            distances: list[float] = [value[0] - r[0] for r in refs if r] if value else []
            nearest = min(distances, key=abs) if distances else None
            off = None if nearest is None else round(nearest, 3) + 0.0
            row.append(None if off is None else f"{off:+.3f}")
            count += off is not None
            if off is not None and abs(off) > NEAR:
                far.append(f"{label(name, experiment)}, {word} ({off:+.3f})")
            if value is None and any(refs):
                absent.append(f"{label(name, experiment)}, {word}")
        rows.append(row)
    heads = ["method"]
    for word in setups.values():
        heads += [f"{word}: here", "paper", "indep.", "off by"]
    parts = [table(heads, rows, " " + "r" * 8)]
    if result["quick"]:
        parts.append("These are numbers of the quick version, which is another, smaller task.")
    ceiling = next(iter(result["lds"].values()))["ceiling"]
    parts.append(
        "*off by*: the distance from the nearer of the two. Noise ceiling: "
        f"{'unknown' if ceiling is None else format(ceiling, '.2f')} here, "
        f"{references['independent']['ceiling']:.2f} in the independent implementation. Sources: "
        f"*paper*: {references['paper']['source']}; "
        f"*indep.*: {references['independent']['source']}."
    )
    near = (
        f"All {count} numbers are within {NEAR:g} of one of the two."
        if not far
        else f"**Not within {NEAR:g} of either: {'; '.join(far)}.** The other "
        f"{count - len(far)} are."
    )
    lines = [near + (f" Not run yet: {'; '.join(absent)}." if absent else "")]
    for who, ref in references.items():
        whose = "paper" if who == "paper" else "independent implementation"
        for setup, word in setups.items():
            lines.append(_order(result, experiment, ref[setup], setup, f"{whose}, {word}"))
    parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts)


def _reference(value: Sequence[float] | None) -> str | None:
    if value is None:
        return None
    return f"{value[0]:.2f}" + (f" ± {value[1]:.2f}" if len(value) > 1 else "")


def _order(
    result: Result,
    experiment: Experiment,
    reference: Mapping[str, Sequence[float]],
    setup: str,
    where: str,
) -> str:
    """Whether the methods have the same order as in a reference; the pairs that do not."""
    lds = result["lds"]
    values = {n: lds[n][setup] for n in reference if lds.get(n, {}).get(setup)}
    swapped = []
    for high, low in itertools.permutations(values, 2):
        if reference[high][0] > reference[low][0] and values[high][0] < values[low][0]:
            disjoint = values[high][2] < values[low][1]
            names = f"{label(low, experiment)} before {label(high, experiment)}"
            swapped.append(names + ("" if disjoint else " (intervals overlap)"))
    sentence = f"Order of the {len(values)} methods as in the {where}"
    if len(values) < 2:
        return f"{sentence}: not run yet."
    return f"{sentence}: yes." if not swapped else f"{sentence}: **no**: {'; '.join(swapped)}."


def claims_part(results: Results) -> str:
    """The claims, a mark for each task, and why SOURCE does not come first."""
    verdicts = claims.verdicts_by_task(results)
    numbered = "\n".join(
        f"{k}. {claim.text[0].upper()}{claim.text[1:]}." for k, claim in enumerate(CLAIMS, 1)
    )
    rows = [
        [title(task, results.get(task)), *map(_mark, by_claim)]
        for task, by_claim in verdicts.items()
    ]
    heads = ["task", *(str(k) for k in range(1, len(CLAIMS) + 1))]
    counts = count_verdicts(verdicts)
    run = sum(counts.values()) - counts[ABSENT]
    legend = (
        f"✓ holds, **✗** does not hold, ? undecided, … not run yet, empty: not claimed. "
        f"{run} of {sum(counts.values())} claims were checked: "
        f"**{counts[HOLDS]} hold, {counts[FAILS]} do not, {counts[OPEN]} are undecided.**"
    )
    failed = [t for t, by_claim in verdicts.items() if by_claim[0] and by_claim[0].word == FAILS]
    return "\n\n".join([numbered, table(heads, rows), legend, *causes(results, failed)])


def causes(results: Results, tasks: Iterable[str]) -> list[str]:
    """What other methods' results say about why SOURCE is not first on these tasks."""
    lines = []
    for task in tasks:
        result, experiment = results[task], TASKS[task]
        source, influence = (result["lds"][n] for n in (experiment.source, "influence"))
        full = result["lds"].get(GAUSS_NEWTON)
        if full and full["of"] == source["of"] and full["single"][0] < influence["single"][0]:
            lines.append(
                f"- {title(task, result)}: with the full Gauss-Newton matrix instead of EK-FAC, "
                f"SOURCE has {with_interval(full['single'])}. The approximation of the curvature "
                "does not seem to be the cause."
            )
        output = results.get(f"{task}_output", {}).get("lds", {})
        if {experiment.source, "influence"} <= output.keys():
            mine, theirs = (output[n]["single"] for n in (experiment.source, "influence"))
            lines.append(
                f"- {title(task, result)}: if the output is measured instead of its absolute "
                f"error, SOURCE has {with_interval(mine)}, influence functions "
                f"{with_interval(theirs)}. Which one is better depends on the measurement."
            )
        for form, words in ADAM_FORMS.items():
            value = result["lds"].get(form, {}).get("single")
            gap = claims.difference(result, experiment.source, form)
            if value and (gap[0] < 0 if gap else value[0] > source["single"][0]):
                sentence = f"SOURCE has {with_interval(value)}"
                if gap:
                    models = counted(result["lds"][form]["of"]["runs"], "model")
                    more = with_interval(claims.negated(gap))
                    sentence += f" (on the same {models}: {more} more)"
                lines.append(f"- {title(task, result)}: {words}, {sentence}.")
    heading = "Why SOURCE does not come first (where we know):"
    return [heading + "\n\n" + "\n".join(lines)] if lines else []


def count_verdicts(verdicts: Mapping[str, Sequence[Verdict | None]]) -> dict[str, int]:
    """How many claims hold, and so on."""
    words = [v.word for by_claim in verdicts.values() for v in by_claim if v is not None]
    return {word: words.count(word) for word in MARKS}


def _mark(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return f"**{MARKS[verdict.word]}**" if verdict.word == FAILS else MARKS[verdict.word]


# --- the page -----------------------------------------------------------------------------------


def text(folder: Path = RESULTS, docs: Path = DOCS) -> str:
    """The page, from the results in a folder and the images of examples below `docs`."""
    results, examples = tables.read(folder), tables.read(folder, "panels")
    file = folder / "reference.json"
    reference = json.loads((file if file.is_file() else RESULTS / "reference.json").read_text())
    forms = ours.read(folder)
    parts: dict[str, Callable[[], str]] = {
        "summary": lambda: summary(results),
        "ours": lambda: ours_part(forms),
        "compared": lambda: compared(results, reference),
        "claims": lambda: claims_part(results),
        **{f"figure {name}": partial(figure, name, results) for name in PLOTS},
        "images": lambda: panels.image_panels(examples, docs),
    }
    return filled("reproduce.template.md", parts)


def draw(folder: Path = RESULTS, docs: Path = DOCS) -> list[str]:
    """Draw all figures that the results have data for, and store the texts of panels.

    Returns:
        the names of the figures.
    """
    results, examples = tables.read(folder), tables.read(folder, "panels")
    drawn: dict[str, Figure] = {}
    for name, plot in PLOTS.items():
        tasks = plot.tasks(results)
        if tasks:
            drawn[name] = plot.draw(results, tasks)
    forms = ours.read(folder)
    if forms:
        drawn[OURS_FIGURE] = figures.beside(forms, list(forms))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn["unrolling"] = two_weights.unrolling(two_weights.two_weights())
    for task in filter(panels.available, panels.of_kind(examples, "image")):
        experiment = TASKS[task]
        recipe, held_out = experiment.recipe(examples[task]["quick"])
        train: Any = recipe.stage(experiment.stage).data.dataset
        image = figures.examples(examples[task], experiment, train, held_out)
        drawn[f"examples-{task}"] = image
    for task in filter(panels.available, panels.of_kind(examples, "text")):
        (folder / "texts").mkdir(exist_ok=True)
        texts = panels.read_texts(examples[task], TASKS[task])
        write_json(folder / "texts" / f"{task}.json", texts, checksum=False)
    for name, image in drawn.items():
        figures.save(image, docs / figures.FOLDER / f"{name}.png")
    return [f"{name}.png" for name in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-figures", action="store_true", help="write the text only")
    options = parser.parse_args()
    if not options.no_figures:
        for name in draw():
            print(f"docs/{figures.FOLDER}/{name}")
    for name, page in (
        ("reproduce", text()),
        ("reproduce-numbers", numbers_page.text()),
        ("negative", negative_page.text()),
    ):
        (DOCS / f"{name}.md").write_text(page)
        print(f"docs/{name}.md")


if __name__ == "__main__":
    main()
