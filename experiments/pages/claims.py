"""What the paper says of its results, and whether the results here say so too.

A comparison holds, or does not, where the 95 % interval of the difference of the two numbers leaves
zero out; it is taken on the same resamples of the subsets, so that what they do to both cancels.
Where the difference is not known (numbers of different tasks or models, older results), the two
intervals must lie apart, which is more careful. Else it is not decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from experiments.pages.tables import Found, baselines, label, over_values, shown
from experiments.tasks import TASKS, Experiment

HOLDS, FAILS, OPEN, ABSENT = "holds", "does not hold", "not decided", "not run yet"
Value = Sequence[float]  # the number, and its interval


@dataclass(frozen=True)
class Verdict:
    """Whether something holds, and by which numbers."""

    word: str
    why: str = ""


OTHER_SIZES = Verdict(OPEN, "the methods were judged at different sizes")


@dataclass(frozen=True)
class Claim:
    """One of the paper's claims.

    Attributes:
        text: the claim.
        of: whether the paper makes it of a task.
        judge: by a task's results.
    """

    text: str
    of: Callable[[Experiment], bool]
    judge: Callable[[Found, Experiment], Verdict]


def above(
    one: Value | None, name: str, other: Value | None, than: str, apart: Value | None = None
) -> Verdict:
    """Whether one number lies above another, by their difference where it is known."""
    if one is None or other is None:
        return Verdict(ABSENT, f"{name if one is None else than} is not there")
    why = f"{name}: {shown(list(one))}, {than}: {shown(list(other))}"
    if apart is None:
        low, high = one[1] - other[2], one[2] - other[1]
    else:
        low, high = apart[1:]
        why += f", difference {shown(list(apart), 3)}"
    return Verdict(HOLDS if low > 0 else FAILS if high < 0 else OPEN, why)


def difference(
    found: Found, high: str, low: str, own: str = "single", theirs: str = "single"
) -> Value | None:
    """One method's LDS minus another's, if it was taken at the sizes that the two have now; where
    one has fewer models, at those."""
    entry = found.get("differences", {}).get(high, {}).get(low, {})
    sizes = [found["lds"].get(name, {}).get("of", {}) for name in (high, low)]
    fewest = {"runs": min(size.get("runs", 0) for size in sizes)}
    known: Value | None = entry.get(own if own == theirs else f"{own}, {theirs}")
    return known if all(entry.get("of") == size | fewest for size in sizes) else None


def turned(apart: Value) -> list[float]:
    """The difference of two the other way round."""
    value, low, high = apart
    return [-value, -high, -low]


def every(verdicts: Iterable[Verdict]) -> Verdict:
    """Whether all hold: the verdict of those that count against it most."""
    found = list(verdicts)
    for word in (FAILS, ABSENT, OPEN):
        against = [v for v in found if v.word == word]
        if against:
            return Verdict(word, "; ".join(dict.fromkeys(v.why for v in against)))
    return Verdict(HOLDS) if found else Verdict(ABSENT)


def value(found: Found, name: str, setup: str = "single") -> Value | None:
    """A method's LDS at α = ½: "single" or "ensemble"."""
    entry = found["lds"].get(name)
    known: Value | None = entry[setup] if entry else None
    return known


def _one(entries: Found, name: str) -> Value | None:
    """One model's LDS over α or epochs; a lone run is kept as an ensemble of one there."""
    entry = entries.get(name, {})
    known: Value | None = entry.get("single") or entry.get("ensemble")
    return known


def _same(found: Found, setups: Mapping[str, str]) -> bool:
    """Whether these methods, each by one model ("single") or by its ensemble, were judged by the
    same truth, and the ensembles have as many models. (One model's LDS is a mean over models, of
    however many there are.)"""
    entries = {name: found["lds"][name] for name in setups if name in found["lds"]}
    truths = [{k: v for k, v in e["of"].items() if k != "runs"} for e in entries.values()]
    models = {
        entry["of"]["runs"]
        for name, entry in entries.items()
        if setups[name] == "ensemble" and entry["ensemble"]
    }
    return all(truth == truths[0] for truth in truths) and len(models) <= 1


def first(
    found: Found, experiment: Experiment, own: str = "single", theirs: str = "single"
) -> Verdict:
    """SOURCE above all baselines; each by one model or by the ensemble."""
    name, others = experiment.source, baselines(experiment)
    if not _same(found, {name: own, **dict.fromkeys(others, theirs)}):
        return OTHER_SIZES
    word = {"single": "", "ensemble": " (ensemble)"}
    mine = label(name, experiment) + word[own]
    return every(
        above(
            value(found, name, own),
            mine,
            value(found, other, theirs),
            other + word[theirs],
            difference(found, name, other, own, theirs),
        )
        for other in others
    )


def pair(high: str, low: str) -> Callable[[Found, Experiment], Verdict]:
    """One method above another, by one model."""

    def judge(found: Found, experiment: Experiment) -> Verdict:
        if not _same(found, {high: "single", low: "single"}):
            return OTHER_SIZES
        names = (label(high, experiment), label(low, experiment))
        apart = difference(found, high, low)
        return above(value(found, high), names[0], value(found, low), names[1], apart)

    return judge


def over_alpha(found: Found, experiment: Experiment) -> Verdict:
    """SOURCE first at every α but 1 - 1/N."""
    name, columns = experiment.source, over_values(found, "alpha")
    asked = (experiment.quick if found["quick"] else experiment.full).alphas
    verdicts = []
    for share in sorted(a for a in (*asked, 0.5) if a < 1):
        entries = columns.get(share, {})
        for other in baselines(experiment):
            mine, its = (_one(entries, n) for n in (name, other))
            verdicts.append(above(mine, f"at α = {share:g}, {label(name, experiment)}", its, other))
    return every(verdicts)


def drops(found: Found, experiment: Experiment) -> Verdict:
    """All methods lower at α = 1 - 1/N than at ½."""
    last = over_values(found, "alpha").get(1.0, {})
    names = (*baselines(experiment), experiment.source)
    return every(
        above(
            value(found, name),
            f"{label(name, experiment)} at α = 0.5",
            _one(last, name),
            "at α = 1 − 1/N",
        )
        for name in names
    )


def gap_closes(found: Found, experiment: Experiment) -> Verdict:
    """SOURCE's lead over influence smaller after the most epochs than after the fewest."""
    columns, name = over_values(found, "epochs"), experiment.source
    asked = (experiment.quick if found["quick"] else experiment.full).epochs
    ends = (min(asked), max(asked))
    if not set(ends) <= set(columns):
        return Verdict(ABSENT)
    leads = []
    for epochs in ends:
        mine, its = (_one(columns[epochs], n) for n in (name, "influence"))
        if mine and its:
            leads.append([mine[0] - its[0], mine[1] - its[2], mine[2] - its[1]])
    if len(leads) < 2:
        return Verdict(ABSENT)
    return above(
        leads[0],
        f"lead after {ends[0]:g} {'epoch' if ends[0] == 1 else 'epochs'}",
        leads[1],
        f"after {ends[1]:g}",
    )


def rises(found: Found, experiment: Experiment) -> Verdict:
    """At the optimum, influence's LDS higher at the largest α than at the smallest."""
    columns = over_values(found, "optimum")
    asked = (*(experiment.quick if found["quick"] else experiment.full).alphas, 0.5)
    low, high = min(asked), max(asked)
    if not {low, high} <= set(columns):
        return Verdict(ABSENT)
    ends = [_one(columns[share], "influence") for share in (high, low)]
    text = "1 − 1/N" if high == 1 else format(high, "g")
    return above(ends[0], f"at α = {text}", ends[1], f"at α = {low:g}")


def removes(found: Found, experiment: Experiment) -> Verdict:
    """SOURCE's removals flip most queries at the largest k."""
    r = found.get("removal")
    if not r:
        return Verdict(ABSENT)
    at_end = {
        name: [shares[-1], *r["interval"][name][-1]]
        for name, shares in r["flipped"].items()
        if name != "Random"
    }
    mine = at_end.pop(experiment.source, None)
    k, apart = r["k"][-1], r.get("differences", {})
    return every(
        above(
            mine,
            f"k = {k}, {label(experiment.source, experiment)}",
            theirs,
            name,
            apart[name][-1] if name in apart else None,
        )
        for name, theirs in at_end.items()
    )


def _groups(*groups: str) -> Callable[[Experiment], bool]:
    return lambda experiment: experiment.group in groups


HARD = ("not converged", "two stages")
CLAIMS = (
    Claim(
        "SOURCE is above RepSim, TracIn, TRAK and influence functions, with one model",
        _groups("converged", *HARD, "linear"),
        first,
    ),
    Claim(
        "the same with ensembles (the paper: on every task but CIFAR-10)",
        lambda e: e.group in ("converged", *HARD) and e.name != "cifar10",
        lambda found, experiment: first(found, experiment, "ensemble", "ensemble"),
    ),
    Claim(
        "influence functions are below TracIn where training did not converge",
        _groups("not converged"),
        pair("TracIn", "influence"),
    ),
    Claim(
        "one model's SOURCE is above the other methods' ensembles where training did not converge "
        "or had two stages",
        _groups(*HARD),
        lambda found, experiment: first(found, experiment, "single", "ensemble"),
    ),
    Claim(
        "FastSource is above influence functions",
        lambda e: e.name in ("fashion_mnist", "cifar10", "rte", "fashion_mnist_n"),
        pair("FastSource", "influence"),
    ),
    Claim(
        "SOURCE is above FastSource",
        lambda e: e.name in ("fashion_mnist", "cifar10", "rte", "fashion_mnist_n"),
        pair("SOURCE", "FastSource"),
    ),
    Claim(
        "three segments are better than one",
        lambda e: e.name == "fashion_mnist",
        pair("SOURCE", "SOURCE, L = 1"),
    ),
    Claim(
        "SOURCE is above the others at every α but 1 − 1/N",
        lambda e: bool(e.full.alphas),
        over_alpha,
    ),
    Claim(
        "all methods predict leaving out one example (α = 1 − 1/N) worse than leaving out half",
        lambda e: e.name == "fashion_mnist",
        drops,
    ),
    Claim(
        "SOURCE's lead over influence functions is smaller after many epochs than after few",
        _groups("linear"),
        gap_closes,
    ),
    Claim(
        "where the optimum is computed, the LDS of influence functions rises with α",
        _groups("linear"),
        rises,
    ),
    Claim(
        "removing what SOURCE names makes more queries wrong than removing what the others name",
        lambda e: e.full.removal is not None,
        removes,
    ),
)


def judged(results: Mapping[str, Found]) -> dict[str, list[Verdict | None]]:
    """{task: a verdict for each claim, or None where the paper does not make it}."""
    table = {}
    for name, experiment in TASKS.items():
        own = [
            None
            if not claim.of(experiment)
            else claim.judge(results[name], experiment)
            if name in results
            else Verdict(ABSENT)
            for claim in CLAIMS
        ]
        if any(verdict is not None for verdict in own):
            table[name] = own
    return table
