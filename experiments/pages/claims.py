"""The paper's claims about its results, and whether the results here support them.

A comparison holds, or fails, if the 95 % interval of the difference of the two numbers excludes
zero. The difference is computed on the same resamples of the subsets, so the variation that both
share cancels. Where it is not available (numbers of different tasks or models, older results), the
two intervals must be disjoint, which is stricter. Otherwise the comparison is undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from experiments.pages.tables import Result, baselines, label, over_values, with_interval
from experiments.tasks import TASKS, Experiment

HOLDS, FAILS, OPEN, ABSENT = "holds", "does not hold", "undecided", "not run yet"
Value = Sequence[float]  # the number, and its interval


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and the numbers behind it."""

    word: str
    why: str = ""


OTHER_SIZES = Verdict(OPEN, "the methods were judged at different sizes")


@dataclass(frozen=True)
class Claim:
    """One of the paper's claims.

    Attributes:
        text: the claim.
        applies: whether the paper makes it about a task.
        judge: the verdict on a task's result.
    """

    text: str
    applies: Callable[[Experiment], bool]
    judge: Callable[[Result, Experiment], Verdict]


def above(
    one: Value | None,
    name: str,
    other: Value | None,
    other_name: str,
    gap: Value | None = None,
) -> Verdict:
    """Whether one number is above another, by the gap between them where it is known."""
    if one is None or other is None:
        return Verdict(ABSENT, f"{name if one is None else other_name} has no result")
    why = f"{name}: {with_interval(list(one))}, {other_name}: {with_interval(list(other))}"
    if gap is None:
        low, high = one[1] - other[2], one[2] - other[1]
    else:
        low, high = gap[1:]
        why += f", difference {with_interval(list(gap), 3)}"
    return Verdict(HOLDS if low > 0 else FAILS if high < 0 else OPEN, why)


def difference(
    result: Result,
    method: str,
    other: str,
    setup: str = "single",
    other_setup: str = "single",
) -> Value | None:
    """One method's LDS minus another's, or None if it was computed at other sizes than the two
    numbers. Where one method has fewer models, the difference is of those."""
    entry = result.get("differences", {}).get(method, {}).get(other, {})
    sizes = [result["lds"].get(name, {}).get("of", {}) for name in (method, other)]
    fewest = {"runs": min(size.get("runs", 0) for size in sizes)}
    key = setup if setup == other_setup else f"{setup}, {other_setup}"
    value: Value | None = entry.get(key)
    return value if all(entry.get("of") == size | fewest for size in sizes) else None


def negated(gap: Value) -> list[float]:
    """The difference with its sign changed, and its interval."""
    value, low, high = gap
    return [-value, -high, -low]


def all_hold(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict for several: the worst of them, with the numbers of all that are as bad."""
    verdicts = list(verdicts)
    for word in (FAILS, ABSENT, OPEN):
        against = [v for v in verdicts if v.word == word]
        if against:
            return Verdict(word, "; ".join(dict.fromkeys(v.why for v in against)))
    return Verdict(HOLDS) if verdicts else Verdict(ABSENT)


def lds_value(result: Result, name: str, setup: str = "single") -> Value | None:
    """A method's LDS at α = ½: "single" or "ensemble"."""
    entry = result["lds"].get(name)
    value: Value | None = entry[setup] if entry else None
    return value


def _one_model(entries: Result, name: str) -> Value | None:
    """One model's LDS over α or epochs, where a single run is stored as an ensemble of one."""
    entry = entries.get(name, {})
    value: Value | None = entry.get("single") or entry.get("ensemble")
    return value


def _comparable(result: Result, setups: Mapping[str, str]) -> bool:
    """Whether methods, each by one model ("single") or by its ensemble, were judged by the same
    truth, with ensembles of the same size. One model's LDS is a mean over any number of models."""
    entries = {name: result["lds"][name] for name in setups if name in result["lds"]}
    truths = [{k: v for k, v in e["of"].items() if k != "runs"} for e in entries.values()]
    models = {
        entry["of"]["runs"]
        for name, entry in entries.items()
        if setups[name] == "ensemble" and entry["ensemble"]
    }
    return all(truth == truths[0] for truth in truths) and len(models) <= 1


def source_first(
    result: Result, experiment: Experiment, setup: str = "single", other_setup: str = "single"
) -> Verdict:
    """SOURCE above all baselines, each by one model or by the ensemble."""
    source, others = experiment.source, baselines(experiment)
    if not _comparable(result, {source: setup, **dict.fromkeys(others, other_setup)}):
        return OTHER_SIZES
    suffix = {"single": "", "ensemble": " (ensemble)"}
    return all_hold(
        above(
            lds_value(result, source, setup),
            label(source, experiment) + suffix[setup],
            lds_value(result, other, other_setup),
            other + suffix[other_setup],
            difference(result, source, other, setup, other_setup),
        )
        for other in others
    )


def ranks_above(high: str, low: str) -> Callable[[Result, Experiment], Verdict]:
    """One method above another, by one model."""

    def judge(result: Result, experiment: Experiment) -> Verdict:
        if not _comparable(result, {high: "single", low: "single"}):
            return OTHER_SIZES
        return above(
            lds_value(result, high),
            label(high, experiment),
            lds_value(result, low),
            label(low, experiment),
            difference(result, high, low),
        )

    return judge


def over_alpha(result: Result, experiment: Experiment) -> Verdict:
    """SOURCE first at every α but 1 - 1/N."""
    name, columns = experiment.source, over_values(result, "alpha")
    asked = (experiment.quick if result["quick"] else experiment.full).alphas
    verdicts = []
    for share in sorted(a for a in (*asked, 0.5) if a < 1):
        entries = columns.get(share, {})
        for other in baselines(experiment):
            mine, theirs = (_one_model(entries, n) for n in (name, other))
            at = f"at α = {share:g}, {label(name, experiment)}"
            verdicts.append(above(mine, at, theirs, other))
    return all_hold(verdicts)


def drops(result: Result, experiment: Experiment) -> Verdict:
    """All methods lower at α = 1 - 1/N than at ½."""
    last = over_values(result, "alpha").get(1.0, {})
    names = (*baselines(experiment), experiment.source)
    return all_hold(
        above(
            lds_value(result, name),
            f"{label(name, experiment)} at α = 0.5",
            _one_model(last, name),
            "at α = 1 − 1/N",
        )
        for name in names
    )


def gap_closes(result: Result, experiment: Experiment) -> Verdict:
    """SOURCE's lead over influence smaller after the most epochs than after the fewest."""
    columns, name = over_values(result, "epochs"), experiment.source
    asked = (experiment.quick if result["quick"] else experiment.full).epochs
    ends = (min(asked), max(asked))
    if not set(ends) <= set(columns):
        return Verdict(ABSENT)
    leads = []
    for epochs in ends:
        mine, theirs = (_one_model(columns[epochs], n) for n in (name, "influence"))
        if mine and theirs:
            leads.append([mine[0] - theirs[0], mine[1] - theirs[2], mine[2] - theirs[1]])
    if len(leads) < 2:
        return Verdict(ABSENT)
    return above(
        leads[0],
        f"lead after {ends[0]:g} {'epoch' if ends[0] == 1 else 'epochs'}",
        leads[1],
        f"after {ends[1]:g}",
    )


def rises(result: Result, experiment: Experiment) -> Verdict:
    """At the optimum, influence's LDS higher at the largest α than at the smallest."""
    columns = over_values(result, "optimum")
    asked = (*(experiment.quick if result["quick"] else experiment.full).alphas, 0.5)
    low, high = min(asked), max(asked)
    if not {low, high} <= set(columns):
        return Verdict(ABSENT)
    ends = [_one_model(columns[share], "influence") for share in (high, low)]
    text = "1 − 1/N" if high == 1 else format(high, "g")
    return above(ends[0], f"at α = {text}", ends[1], f"at α = {low:g}")


def removes(result: Result, experiment: Experiment) -> Verdict:
    """SOURCE's removals flip most queries at the largest k."""
    removal = result.get("removal")
    if not removal:
        return Verdict(ABSENT)
    at_end = {
        name: [shares[-1], *removal["interval"][name][-1]]
        for name, shares in removal["flipped"].items()
        if name != "Random"
    }
    mine = at_end.pop(experiment.source, None)
    k, differences = removal["k"][-1], removal.get("differences", {})
    return all_hold(
        above(
            mine,
            f"k = {k}, {label(experiment.source, experiment)}",
            theirs,
            name,
            differences[name][-1] if name in differences else None,
        )
        for name, theirs in at_end.items()
    )


def _groups(*groups: str) -> Callable[[Experiment], bool]:
    return lambda experiment: experiment.group in groups


NOT_CONVERGED_OR_STAGED = ("not converged", "two stages")
CLAIMS = (
    Claim(
        "SOURCE is above RepSim, TracIn, TRAK and influence functions, with one model",
        _groups("converged", *NOT_CONVERGED_OR_STAGED, "linear"),
        source_first,
    ),
    Claim(
        "the same with ensembles (the paper: on every task but CIFAR-10)",
        lambda e: e.group in ("converged", *NOT_CONVERGED_OR_STAGED) and e.name != "cifar10",
        lambda result, experiment: source_first(result, experiment, "ensemble", "ensemble"),
    ),
    Claim(
        "influence functions are below TracIn where training did not converge",
        _groups("not converged"),
        ranks_above("TracIn", "influence"),
    ),
    Claim(
        "SOURCE with one model is above the other methods' ensembles where training did not "
        "converge or had two stages",
        _groups(*NOT_CONVERGED_OR_STAGED),
        lambda result, experiment: source_first(result, experiment, "single", "ensemble"),
    ),
    Claim(
        "FastSource is above influence functions",
        lambda e: e.name in ("fashion_mnist", "cifar10", "rte", "fashion_mnist_n"),
        ranks_above("FastSource", "influence"),
    ),
    Claim(
        "SOURCE is above FastSource",
        lambda e: e.name in ("fashion_mnist", "cifar10", "rte", "fashion_mnist_n"),
        ranks_above("SOURCE", "FastSource"),
    ),
    Claim(
        "three segments are better than one",
        lambda e: e.name == "fashion_mnist",
        ranks_above("SOURCE", "SOURCE, L = 1"),
    ),
    Claim(
        "SOURCE is above the others at every α but 1 − 1/N",
        lambda e: bool(e.full.alphas),
        over_alpha,
    ),
    Claim(
        "all methods predict the removal of one example (α = 1 − 1/N) worse than that of half",
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
        "removing the examples that SOURCE ranks most helpful flips more queries than removing "
        "those of the other methods",
        lambda e: e.full.removal is not None,
        removes,
    ),
)


def verdicts_by_task(results: Mapping[str, Result]) -> dict[str, list[Verdict | None]]:
    """{task: a verdict on each claim, or None where the paper does not make it}."""
    table = {}
    for name, experiment in TASKS.items():
        verdicts = [
            None
            if not claim.applies(experiment)
            else claim.judge(results[name], experiment)
            if name in results
            else Verdict(ABSENT)
            for claim in CLAIMS
        ]
        if any(verdict is not None for verdict in verdicts):
            table[name] = verdicts
    return table
