"""The report in a real browser, from disk and without a network: python -m pytest -m browser"""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.browsing import EVIL, Opened, violations
from torch.utils.data import TensorDataset

import whence
from whence.engine.tokens import Tokens
from whence.report import HTML

pytestmark = pytest.mark.browser


class Visit(Opened):
    """A page opened from disk."""

    def __init__(self, browser: Any, path: Path, place: str = "#queries", **context: Any) -> None:
        super().__init__(browser, path.as_uri() + place, **context)
        self.page.wait_for_selector("html[data-ready]", state="attached")

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                assert self.complaints == []
                assert [url for url in self.asked if not url.startswith(("file:", "data:"))] == []
        finally:
            self.context.close()


def made(queries: int = 12, examples: int = 60, **more: Any) -> whence.Scores:
    values = np.random.default_rng(0).standard_t(3, (queries, examples)).astype(np.float32)
    about = {"method": "Source", "measurement": "margin", "unit": "logits"} | more
    parts = np.stack([values * 0.25, values * 0.75])
    return whence.Scores(values, higher_is_better=True, by_segment=parts, **about)


def pictures(count: int, seed: int = 0) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 8, 8, generator=random)
    return TensorDataset(images, torch.randint(3, (count,), generator=random))


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return made().report(tmp_path / "r.html", train=pictures(60), query=pictures(12, 1))


def test_looking_at_queries_by_keyboard(browser: Any, report: Path) -> None:
    with Visit(browser, report) as visit:
        page = visit.page
        assert visit.text("h2") == "Query 0"
        assert page.locator(".ranking.helpful .card").count() == 10
        assert page.locator(".ranking.harmful .card").count() == 10
        for key, expected in (
            ("j", 1),
            ("ArrowDown", 2),
            ("ArrowRight", 3),
            ("k", 2),
            ("ArrowUp", 1),
        ):
            page.keyboard.press(key)
            page.wait_for_selector(f"h2:text-is('Query {expected}')")
        current = page.locator(".query-item[aria-current]")
        assert current.count() == 1 and "query 1" in str(current.text_content())
        page.keyboard.press("/")
        page.keyboard.type("11")  # typed into the filter, not taken for commands
        assert page.locator(".query-item").count() == 1
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        page.wait_for_selector("h2:text-is('Query 11')")


def test_values_and_charts_are_those_of_the_scores(browser: Any, report: Path) -> None:
    scores = made()
    best = scores.helpful(3, 1)[0]
    with Visit(browser, report, "#query=3") as visit:
        card = visit.page.locator(".ranking.helpful .card").first
        assert f"#{best.example}" in card.inner_text()
        assert "rank 1" in card.inner_text() and "logits" not in card.inner_text()
        title = card.locator(".value").get_attribute("title")
        assert f"+{best.value:.3g}"[:5] in title and "not calibrated" in title
        assert "sum" not in visit.text(".query-head") and "relative" in visit.text(".sizes")
        timeline = card.locator("svg.timeline")
        assert "segment 2: +" in str(timeline.get_attribute("aria-label"))
        heights = [float(r.get_attribute("height")) for r in timeline.locator("rect").all()]
        assert heights[0] == pytest.approx(heights[1] / 3, rel=0.01)
        bars = visit.page.locator("svg.histogram rect title").all_text_contents()
        assert sum(int(bar.split()[0].replace(",", "")) for bar in bars) == 60
        picture = card.locator("img")
        assert picture.evaluate("image => image.naturalWidth") == 8


def test_calibrated_changes_are_shown_with_their_interval(browser: Any, tmp_path: Path) -> None:
    fit = {"slope": 0.5, "standard_error": 0.1, "quantile": 2.0, "removals": 4.0, "subsets": 9}
    fit |= {"fitted": 0.6, "interval": [0.4, 0.8], "residual": [0.3] * 12, "noise": [0.2] * 12}
    scores = made(diagnostics={"calibration": fit})
    best = scores.helpful(3, 1)[0]
    half = 2 * np.sqrt((best.value * 0.2) ** 2 + (0.09 - 0.04) / 4)
    path = scores.report(tmp_path / "c.html", train=pictures(60), query=pictures(12, 1))
    with Visit(browser, path, "#query=3") as visit:
        text = visit.page.locator(".ranking.helpful .card .value").first.inner_text()
        assert text.startswith("+") and "rank" not in text
        change, within = (float(part) for part in text.split("±"))
        assert change == pytest.approx(best.value, rel=5e-3)
        assert within == pytest.approx(half, rel=0.05)
        assert visit.page.locator(".sizes").count() == 0
        for value in visit.page.locator(".card .value > span").all():  # in sight, in a narrow card
            assert value.evaluate("s => s.getBoundingClientRect().right") <= value.evaluate(
                "s => s.closest('.card').getBoundingClientRect().right"
            )


def test_an_example_opens_and_leads_to_its_queries(browser: Any, report: Path) -> None:
    with Visit(browser, report) as visit:
        page = visit.page
        page.locator(".ranking.harmful .card-face").first.focus()
        page.keyboard.press("Enter")
        dialog = page.locator("dialog[open]")
        assert "Training example #" in dialog.inner_text()
        link = dialog.locator(".related button").last
        row = link.inner_text().removeprefix("query ")
        link.click()
        page.wait_for_selector(f"h2:text-is('Query {row}')")
        assert page.locator("dialog[open]").count() == 0


def test_the_report_begins_with_an_overview(browser: Any, tmp_path: Path) -> None:
    scores, query = made(), pictures(12, 1)
    path = scores.report(tmp_path / "r.html", train=pictures(60), query=query)
    with Visit(browser, path, "") as visit:
        assert visit.text("h2") == "Overview"
        best = int(np.argmax(scores.values.mean(0)))
        first = visit.page.locator(".ranking.helpful .card-face").first
        assert f"#{best}" in first.inner_text()
        assert visit.page.locator(".heatmap tbody tr").count() == 3
        first.click()
        assert f"Training example #{best}" in visit.text("dialog")


def test_the_other_pages(browser: Any, report: Path) -> None:
    worst = made().values.mean(0).argsort()[:2]
    with Visit(browser, report) as visit:
        page = visit.page
        page.click("text=Most harmful overall")
        page.wait_for_selector("h2:text-is('Most harmful over all queries')")
        rows = page.locator(".listing tbody tr")
        for k, example in enumerate(worst):
            assert f"#{example}" in rows.nth(k).inner_text()
        rows.first.locator("button.link").click()
        page.wait_for_selector("h2:has-text('Query ')")
        page.click("nav.tabs >> text=About")
        page.wait_for_selector("h2:text-is('About these scores')")
        assert "values[q, m] estimates f(with m) - f(without m)" in visit.text(".about")
        assert "could not be checked" in visit.text(".notices")
    with Visit(browser, report, "#query=99") as visit:
        assert "no such query" in visit.text("main")


def test_training_text_is_only_text(browser: Any, tmp_path: Path) -> None:
    train = [(EVIL, 0)] * 58 + [("z" * 1_000_000, 1), ("", 2)]
    path = made(method=EVIL, settings={EVIL: EVIL}).report(
        tmp_path / "r.html", train=train, query=[(EVIL, 0)] * 12, classes=[EVIL, EVIL], title="safe"
    )
    for place in ("", "#harmful", "#about"):
        with Visit(browser, path, place) as visit:
            assert visit.page.title() == "safe"
            assert visit.page.locator("main img, main script, main svg[onload]").count() == 0
            if not place:
                assert "<script>document.title='owned'</script>" in visit.text(".card .words")
                assert visit.page.evaluate("document.documentElement.scrollWidth") == 1280


def test_nothing_runs_in_what_a_renderer_made(browser: Any, tmp_path: Path) -> None:
    def shown(example: Any) -> HTML:
        word = html.escape("<i>")
        return HTML(f"<b style='color: rgb(1, 2, 3)'>{word}</b><img src=x onerror='owned=1'>")

    path = made().report(
        tmp_path / "r.html", train=pictures(60), query=pictures(12), renderer=shown
    )
    with Visit(browser, path) as visit:
        bold = visit.page.locator(".card b").first
        assert bold.inner_text() == "<i>"
        assert bold.evaluate("b => getComputedStyle(b).color") == "rgb(1, 2, 3)"
        assert visit.page.evaluate("typeof owned") == "undefined"
        assert all("Content Security Policy" in said for said in visit.complaints)
        visit.complaints.clear()
        visit.asked = [url for url in visit.asked if not url.endswith("/x")]


def test_tokens_rows_and_self_influence(browser: Any, tmp_path: Path) -> None:
    ids = TensorDataset(torch.arange(60 * 4).reshape(60, 4))
    tokens = [Tokens(k, np.tile([3.0, -3.0, 0.0, 1.0], (12, 1)), np.zeros(12)) for k in range(60)]
    path = made().report(tmp_path / "t.html", train=ids, tokens=tokens)
    with Visit(browser, path) as visit:
        words = visit.page.locator(".card .tokens").first
        assert words.locator(".token.helpful").count() == 2
        harmed = words.locator(".token.harmful")
        style = harmed.evaluate("token => getComputedStyle(token).textDecorationStyle")
        assert harmed.count() == 1 and style == "wavy"  # told apart without colours, too
    table = TensorDataset(torch.rand(60, 3), torch.rand(60))
    path = made().report(tmp_path / "r.html", train=table, columns=["a", "b", "<c>"])
    with Visit(browser, path) as visit:
        assert "<c>" in visit.text(".card .cells")
    values = np.random.default_rng(0).standard_normal(60)
    selves = whence.Scores(
        values, method="Source", measurement="loss", unit="nats", higher_is_better=False
    )
    with Visit(browser, selves.report(tmp_path / "s.html", train=pictures(60))) as visit:
        assert "Most memorised training examples" in visit.text("h2")
        assert f"#{values.argmin()}" in visit.page.locator(".listing tbody tr").first.inner_text()
        visit.page.keyboard.press("j")  # there is no list of queries to walk


def test_light_dark_and_narrow(browser: Any, report: Path) -> None:
    def background(visit: Visit) -> str:
        return str(visit.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with Visit(browser, report, color_scheme="light") as light:
        before = background(light)
        light.page.click(".theme")
        assert background(light) != before
    with Visit(browser, report, color_scheme="dark") as dark:
        assert background(dark) != before
    for place in ("", "#harmful", "#about"):
        with Visit(browser, report, place, viewport={"width": 400, "height": 800}) as narrow:
            assert narrow.page.evaluate("document.documentElement.scrollWidth") == 400


def test_a_thousand_queries_are_walked(browser: Any, tmp_path: Path) -> None:
    path = made(1000, 2000).report(
        tmp_path / "r.html", train=pictures(2000), query=pictures(1000, 1)
    )
    with Visit(browser, path, "#query=998") as visit:
        visit.page.keyboard.press("j")
        visit.page.wait_for_selector("h2:text-is('Query 999')")
        visit.page.keyboard.press("j")  # the last stays
        assert visit.text("h2") == "Query 999"


def test_a_text_beside_its_query(browser: Any, tmp_path: Path) -> None:
    train = [
        (text, 0) for text in (f"{EVIL} wonderful cast", "Dull, and of it", "a warm, DULL day")
    ]
    scores = made(1, 3, method="M")
    path = scores.report(
        tmp_path / "t.html", train=train, query=[("A wonderful, dull day of it", 1)]
    )
    with Visit(browser, path) as visit:
        page = visit.page
        page.get_by_role("button", name="training example #0,").click()
        dialog = page.locator("dialog[open]")
        assert [m.inner_text() for m in dialog.locator("mark").all()] == ["wonderful"] * 2
        assert page.title() != "owned" and "<script>" in dialog.inner_text()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="training example #1,").click()
        # "of it" is shared, but short words count only three at a time; "dull" has four letters
        assert dialog.locator("mark").count() == 0
        assert "3 different ones" in dialog.inner_text()
        page.keyboard.press("Escape")
        assert page.get_by_role("button", name="training example #1,").evaluate(
            "b => b === document.activeElement"
        )


def test_a_row_beside_its_query_column_by_column(browser: Any, tmp_path: Path) -> None:
    rows = [{"age": 20, "city": "Rome"}, {"age": 60, "city": "Oslo"}, {"age": 30, "city": "Rome"}]
    train = [(row, k % 2) for k, row in enumerate(rows)]
    path = made(1, 3).report(
        tmp_path / "t.html", train=train, query=[({"age": 40, "city": "Oslo"}, 1)]
    )
    with Visit(browser, path) as visit:
        visit.page.get_by_role("button", name="training example #2,").click()
        lines = visit.page.locator("dialog tbody tr")
        cells = [line.locator("th, td").all_inner_texts() for line in lines.all()]
        assert cells == [
            ["label", "1", "0", ""],
            ["age", "40", "30", ""],
            ["city", "Oslo", "Rome", ""],
        ]
        lengths = [
            b.evaluate("b => b.style.getPropertyValue('--length')")
            for b in lines.locator(".bar").all()
        ]
        assert lengths == ["25.0%", "100.0%"]  # ages at hand: 20 to 60


def test_near_duplicates_are_one_card_and_pictures_grow(browser: Any, tmp_path: Path) -> None:
    data = pictures(60)
    data.tensors[0][7], data.tensors[1][7] = data.tensors[0][3], data.tensors[1][3]
    values = np.linspace(1, 2, 60, dtype=np.float32)[None].repeat(2, 0)
    values[:, 3], values[:, 7] = 9, 8
    scores = whence.Scores(
        values, method="M", measurement="margin", unit="logits", higher_is_better=True
    )
    path = scores.report(tmp_path / "d.html", train=data, query=pictures(2, 1))
    with Visit(browser, path) as visit:
        page = visit.page
        cards = page.locator(".ranking.helpful .card")
        assert cards.count() == 9 and "+ 1 alike" in cards.first.inner_text()
        face = cards.first.locator(".card-face")
        assert "1 near-duplicate" in face.inner_text()
        wide = "b => b.querySelector('img').getBoundingClientRect().width"
        before = face.evaluate(wide)
        page.keyboard.press("Tab")
        face.focus()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Tab")  # by the keyboard, so that the focus is visible
        assert face.evaluate(wide) > 2 * before
        page.keyboard.press("Enter")
        page.locator("dialog .facts button", has_text="#7").click()
        assert "Training example #7" in visit.text("dialog h2")
        assert page.locator("dialog figure img").count() == 4  # query, example, their difference


def test_influence_is_drawn_under_the_curve_of_the_query(browser: Any, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    states = [{n: (k + 1) * t for n, t in model.state_dict().items()} for k in range(4)]
    run = whence.Run.from_checkpoints(states[1:], [10, 20, 40], 0.1, initial=states[0])
    study = whence.Study(model, whence.Classification(), pictures(60), run)
    scores = whence.Source(segments=3).attribute(
        study, pictures(4, 1), by_segment=True, progress=False
    )
    path = scores.report(tmp_path / "w.html", study=study, query=pictures(4, 1))
    with Visit(browser, path) as visit:
        dots = visit.page.locator("svg.when .curve-dot")
        assert [float(d.get_attribute("cx")) for d in dots.all()] == [0, 80, 160, 320]
        bars = visit.page.locator("svg.when rect.helpful")
        assert bars.count() == 3
        last = float(bars.nth(2).get_attribute("width"))
        assert last > 1.5 * float(bars.nth(0).get_attribute("width"))  # 20 updates, and 10


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_fault(browser: Any, report: Path, tmp_path: Path, theme: str) -> None:
    rows = [({"age": k, "city": "Rome"}, k % 2) for k in range(60)]
    of_rows = made().report(tmp_path / "rows.html", train=rows, query=rows[:12])
    context = {"color_scheme": theme, "bypass_csp": True}
    for path, place in ((report, "#overview"), (report, "#queries"), (of_rows, "#queries")):
        with Visit(browser, path, place, **context) as visit:
            assert violations(visit.page) == []
            visit.page.locator(".card-face").first.click()
            assert violations(visit.page) == []
    for place in ("#harmful", "#about"):
        with Visit(browser, report, place, **context) as visit:
            assert violations(visit.page) == []


def test_the_focus_goes_through_the_page_in_its_order(browser: Any, report: Path) -> None:
    regions = (
        ".brand, .tabs, .theme, .sidebar-head, .query-list, .ranking.helpful, .ranking.harmful"
    )
    where = """(regions) => {
      const at = document.activeElement, region = at.closest(regions);
      const name = at.innerText || at.ariaLabel, seen = at.getBoundingClientRect().width > 0;
      return [region ? region.className : at.tagName, seen, name];
    }"""
    with Visit(browser, report) as visit:
        parts, names = [], []
        for _ in range(1 + 4 + 1 + 2 + 12 + 20):
            visit.page.keyboard.press("Tab")
            part, seen, name = visit.page.evaluate(where, regions)
            assert seen
            parts.append(part)
            names.append(name)
        assert list(dict.fromkeys(parts)) == [
            "brand",
            "tabs",
            "theme",
            "sidebar-head",
            "query-list",
            "ranking helpful",
            "ranking harmful",
        ]
        assert all(names)  # whatever has the focus has a name
