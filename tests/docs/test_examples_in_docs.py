"""The documentation: marked examples run and print what the page shows, all others are Python.

A page continues the example of the front page, docs/index.md: its names are there,
and so is the run that it recorded. Tutorials start from nothing. `tools/run.py` says how pages are
marked, and makes outputs and figures anew.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import run as pages
from tools.figures import guides
from whence.layers import KINDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

PAGES = pages.pages()
RUN = [name for name, text in PAGES.items() if any(marked for marked, _ in pages.blocks(text))]
LONG = [
    f"tutorials/{name}"
    for name in ("language-model", "own-loop", "mislabelled", "table", "reviews", "preferences")
]
PEERS = {"coming-from": ("kronfluence", "trak")}
METHODS = [
    "source",
    "fastsource",
    "influence",
    "tracin",
    "trak",
    "repsim",
    "baselines",
    "hydra",
    "unrolled",
    "retrained",
]
SECTIONS = [
    "What it estimates",
    "Cost",
    "When to prefer it",
    "What it assumes",
    "What can go wrong",
    "Sign and scale",
]


@pytest.fixture
def as_before() -> Iterator[None]:
    """Kinds of layers that a page registers, and its warning filters, are forgotten again."""
    before = list(KINDS)
    with warnings.catch_warnings():
        yield
    KINDS[:] = before


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.filterwarnings("ignore:.*one at a time")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in RUN]
)
def test_examples_run(page: str, tmp_path: Path, as_before: None) -> None:
    for peer in PEERS.get(page, ()):
        pytest.importorskip(peer)
    if missing := pages.missing_data(PAGES[page]):
        pytest.skip(f"{missing[0]} is not in $WHENCE_DATA")
    outcome = pages.play(page, PAGES[page], tmp_path)
    assert not outcome.failed, f"{page}.md claims what is not so: {outcome.failed}"
    for block, printed in outcome.outputs:
        again = f"python -m tools.run {page}"
        assert pages.shape(printed) == pages.shape(block["output"]), again
    if page.startswith("tutorials/"):
        for figure in pages.figures(PAGES[page]):
            assert (tmp_path / figure).exists(), f"{figure} is shown, but not drawn"
    if page == "tasks":
        assert outcome.names["predicted"] == pytest.approx(outcome.names["real"], rel=0.25)


@pytest.mark.parametrize("page", PAGES)
def test_other_examples_are_python(page: str) -> None:
    for marked, code in pages.blocks(PAGES[page]):
        if not marked:
            ast.parse(code)


def test_code_fits_its_column() -> None:
    """Code of 102 characters fits a window of 1280 pixels (docs/assets/site.css)."""
    code = re.compile(r"^ *```(?:python|sh|console|yaml)\n(.*?)^ *```$", re.M | re.S)
    long = [
        f"{page}: {line}"
        for page, text in PAGES.items()
        for block in code.findall(text)
        for line in block.splitlines()
        if len(line) > 102
    ]
    assert not long, long


def test_a_page_that_claims_too_much_is_noticed(tmp_path: Path) -> None:
    text = "<!-- test -->\n```python\na = 1\nprint('a is', a)\n```\n<!-- check: a == 2 -->\n"
    text += "<!-- output -->\n```text\nb is 1\n```\n"
    outcome = pages.play("tutorials/none", text, tmp_path)
    assert outcome.failed == ["a == 2"]
    ((block, printed),) = outcome.outputs
    assert pages.shape(printed) != pages.shape(block["output"])
    assert pages.shape("a is -1.5e-3, 20 %") == pages.shape("a  is 7, 3.25 %")


def test_tutorials_end_with_a_proof() -> None:
    tutorials = [name for name in PAGES if name.startswith("tutorials/")]
    assert len(tutorials) == 9
    for name in tutorials:
        assert "<!-- check:" in PAGES[name], name
        assert re.search(r"ground_truth|Truth\(|(measure|select)\(recipe", PAGES[name]), name


def test_figures_are_there() -> None:
    for name, text in PAGES.items():
        for figure in pages.figures(text):
            assert (DOCS / name).parent.joinpath(figure).exists(), f"{name}: {figure}"


def test_every_guide_page_has_a_figure() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    guide = navigation.split("- Guide:")[1].split("- Methods:")[0]
    names = re.findall(r": ([\w-]+)\.md$", guide, re.M)
    assert len(names) > 10
    assert not [name for name in names if not pages.FIGURE.search(PAGES[name])]
    shown = {name for name in names if f"(figures/guide-{name}.png)" in PAGES[name]}
    assert shown == set(guides.DRAWN), "each figure has a script, and is shown"


@pytest.mark.parametrize("page", METHODS)
def test_method_pages_say_the_same_things(page: str) -> None:
    headings = re.findall(r"^## (.*)$", PAGES[page], re.M)
    assert [h for h in headings if h in SECTIONS], page
    missing = [section for section in SECTIONS if section not in headings]
    assert not missing, f"{page}.md says nothing of: {missing}"
    assert "$$" in PAGES[page], f"{page}.md has no formula"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(PAGES)


def test_nothing_is_fetched_from_other_sites() -> None:
    assert not re.search(r"https?://", (ROOT / "mkdocs.yml").read_text())
    for file in ("maths.js", "site.css", "katex/katex.min.css"):
        assert not re.search(r"url\(['\"]?https?:|src\s*=", (DOCS / "assets" / file).read_text())


ROOMS = ("", ".evaluate", ".explore", ".report", ".retrain")  # whose names are for users


def named(path: str) -> object:
    """What `::: path` documents; a function before the module of its name."""
    owner, _, name = path.rpartition(".")
    try:
        holder: object = importlib.import_module(owner)
    except ImportError:  # a class
        holder = named(owner)
    return getattr(holder, name)


def test_every_public_name_is_in_the_reference() -> None:
    documented = re.findall(r"^::: ([\w.]+)$", PAGES["api"], re.M)
    objects = {id(named(path)) for path in documented}
    whole = {path for path in documented if inspect.ismodule(named(path))}
    missing = []
    for room in (importlib.import_module(f"whence{name}") for name in ROOMS):
        for name in room.__all__:
            value = getattr(room, name)
            if inspect.ismodule(value) or id(value) in objects or value.__module__ in whole:
                continue
            missing.append(f"{room.__name__}.{name}")
    assert not missing, f"docs/api.md lacks {missing}"


def test_the_reference_lists_each_name_once_and_nothing_private() -> None:
    documented = re.findall(r"^::: ([\w.]+)$", PAGES["api"], re.M)
    assert len(documented) == len(set(documented))
    modules = [path for path in documented if inspect.ismodule(named(path))]
    inside = [p for p in documented if any(p.startswith(f"{m}.") for m in modules)]
    assert not inside, "the module lists them already"
    assert 'filters: ["!^_"]' in (ROOT / "mkdocs.yml").read_text()
