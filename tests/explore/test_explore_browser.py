"""The explorer in a real browser: python -m pytest -m browser"""

from __future__ import annotations

import csv
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import recipes
from support.browsing import EVIL, Opened, violations

import whence
from whence.explore import Running, start
from whence.explore.server import Guard
from whence.report import HTML

pytestmark = pytest.mark.browser

Q, N = 12, recipes.N
PAGES = ("overview", "queries", "examples", "map", "compare", "audit", "whatif", "about")
QUERY = recipes.dataset(Q, 7)


class Slow(torch.nn.Sequential):
    """An MLP that takes its time while `Slow.waits` is set, and fails while `Slow.fails` is."""

    waits, fails = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and Slow.waits.is_set():
            time.sleep(0.01)
        if self.training and Slow.fails.is_set():
            raise RuntimeError(f"out of luck {EVIL}")
        return super().forward(x)


def slow() -> torch.nn.Module:
    return Slow(recipes.mlp())


def scores(seed: int = 0, **more: Any) -> whence.Scores:
    values = np.random.default_rng(seed).standard_t(3, (Q, N)).astype(np.float32)
    about = {"method": "Made", "measurement": "margin", "unit": "logits"} | more
    return whence.Scores(values, higher_is_better=True, **about)


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("explore")
    recipe = recipes.recipe(model=slow, epochs=10)
    run = recipe.run(0, folder / "run", device="cpu")
    study = whence.Study(slow(), whence.Classification(), recipes.dataset(), run)
    own = np.random.default_rng(3).standard_normal(N)
    made = {
        "first": scores(),
        "second": scores(1),
        "self": whence.Scores(
            own, method="Made", measurement="margin", unit="logits", higher_is_better=True
        ),
    }
    with start(made, study=study, query=QUERY, recipe=recipe, out=folder / "jobs") as page:
        yield page


class Visit(Opened):
    """A page of the explorer; whatever it complains of must be nothing."""

    def __init__(
        self, browser: Any, explorer: Running, place: str = "#page=queries", **context: Any
    ) -> None:
        self.address = explorer.address
        super().__init__(browser, explorer.url + place, accept_downloads=True, **context)
        self.ready("*")

    def ready(self, name: str) -> None:
        which = "[data-ready]" if name == "*" else f'[data-ready="{name}"]'
        self.page.wait_for_selector(f"html{which}", state="attached")
        self.page.wait_for_selector("main:not([aria-busy])")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def until(self, told: Callable[[], object], seconds: float = 15) -> None:
        """Wait for it. (The page's policy forbids Playwright's own way, which is eval.)"""
        end = time.monotonic() + seconds
        while not told():
            assert time.monotonic() < end, self.text("main")
            self.page.wait_for_timeout(20)

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                assert self.complaints == []
                assert [u for u in self.asked if not u.startswith((self.address, "data:"))] == []
                assert self.page.title() == "whence explore"
        finally:
            self.context.close()


def test_queries_by_keyboard(browser: Any, explorer: Running) -> None:
    made = scores()
    with Visit(browser, explorer) as visit:
        page = visit.page
        assert "token" not in page.url  # it does not stay in the address bar
        assert visit.text("h2") == "Query 0"
        for key, row in (("j", 1), ("ArrowDown", 2), ("k", 1)):
            page.keyboard.press(key)
            visit.until(lambda row=row: visit.text("h2") == f"Query {row}")
        best = made.helpful(1, 10).examples
        shown = page.locator(".ranking.helpful .card-face").evaluate_all(
            "all => all.map(one => one.innerText)"
        )
        assert [int(one.split("#")[1].split(",")[0]) for one in shown] == best
        page.keyboard.press("/")
        page.keyboard.type("#5")
        visit.until(lambda: visit.count(".query-item") == 1)
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        visit.until(lambda: visit.text("h2") == "Query 5")
        # tick by keyboard: the first card in focus
        page.locator(".card-face").first.focus()
        page.keyboard.press("x")
        assert visit.text("#ticked") == "1"
        page.keyboard.press("?")
        assert "next and previous query" in visit.text("dialog")
        page.keyboard.press("Escape")
        for key, name in (("3", "examples"), ("5", "compare"), ("6", "audit"), ("8", "about")):
            page.keyboard.press(key)
            visit.ready(name)
        page.go_back()
        visit.ready("audit")
        page.reload()
        visit.ready("audit")  # a reload needs no token in the address
        assert visit.text("#ticked") == "1"


def test_an_address_names_a_query_further_down(browser: Any) -> None:
    values = np.random.default_rng(0).standard_normal((250, N)).astype(np.float32)
    many = whence.Scores(
        values, method="Made", measurement="margin", unit="logits", higher_is_better=True
    )
    with (
        start({"many": many}) as explorer,
        Visit(browser, explorer, "#page=queries&row=240") as visit,
    ):
        chosen = visit.page.locator(".query-item[aria-current]")
        assert chosen.inner_text().split()[-1] == "240"
        box = chosen.bounding_box()
        assert box is not None and 0 < box["y"] < 900
        visit.page.keyboard.press("k")
        visit.until(lambda: visit.text("h2") == "Query 239")


def test_the_explorer_begins_with_an_overview(browser: Any, explorer: Running) -> None:
    made = scores()
    with Visit(browser, explorer, "") as visit:
        visit.until(lambda: visit.text("h2") == "Overview")
        best = int(np.argmax(made.values.mean(0)))
        first = visit.page.locator(".ranking.helpful .card-face").first
        assert f"#{best}," in first.inner_text()
        assert "queries predicted correctly" in visit.text(".summary .facts")
        visit.page.locator(".ranking.harmful .tick input").first.check()
        assert visit.text("#ticked") == "1"


def test_training_data_is_searched_and_filtered(browser: Any, explorer: Running) -> None:
    made = scores()
    with Visit(browser, explorer, "#page=examples&row=3") as visit:
        page = visit.page
        worst = made.harmful(3, 1)[0]
        page.select_option("#filter-sort", "harmful")
        visit.until(lambda: f"#{worst.example}" in visit.text("tbody .example-cell"))
        page.select_option("#filter-sign", "helpful")
        count = int((made.values[3] > 0).sum())
        visit.until(lambda: f"{count} training examples of {N}" in visit.text(".plain-head"))
        page.select_option("#filter-sign", "")
        search = page.get_by_label("Search text or #number")
        search.fill("#17")
        visit.until(lambda: visit.count("tbody tr") == 1)
        assert "#17" in visit.text("tbody")
        assert search.evaluate("box => box === document.activeElement")  # typing continues
        page.locator(".example-button").click()
        visit.until(lambda: "Training example #17" in visit.text("dialog"))
        values = made.values[:, 17]
        assert f"query {int(values.argmax())}" in visit.text("dialog")


def test_the_map_is_lassoed_and_walked_by_keyboard(browser: Any, explorer: Running) -> None:
    made = scores()
    with Visit(browser, explorer, "#page=map&row=2") as visit:
        page = visit.page
        visit.until(lambda: visit.count("canvas.map") == 1, 30)
        page.wait_for_timeout(300)
        box = page.locator("canvas.map").bounding_box()
        left, top, right, bottom = 3, 3, box["width"] - 3, box["height"] - 3
        page.mouse.move(box["x"] + left, box["y"] + top)
        page.mouse.down()
        for x, y in ((right, top), (right, bottom), (left, bottom)):
            page.mouse.move(box["x"] + x, box["y"] + y, steps=3)
        page.mouse.up()
        assert f"{N} training examples selected" in visit.text(".map-page [role=status]")
        page.get_by_role("button", name="Tick them").click()
        assert visit.text("#ticked") == str(N)
        page.locator("canvas.map").focus()
        page.keyboard.press("]")
        strongest = int(np.argmax(np.abs(made.values[2])))
        assert f"place {strongest}: rank 1 by strength" in visit.text(".map-page [role=status]")
        page.keyboard.press("Enter")
        visit.until(lambda: f"Training example #{strongest}" in visit.text("dialog"))
        page.keyboard.press("Escape")
        page.keyboard.press("+")
        page.keyboard.press("ArrowLeft")
        page.get_by_role("button", name="What if they were missing").click()
        visit.ready("whatif")


def test_two_scores_side_by_side(browser: Any, explorer: Running) -> None:
    from scipy.stats import spearmanr

    a, b = scores(), scores(1)
    with Visit(browser, explorer, "#page=compare&row=2") as visit:
        page = visit.page
        rank = spearmanr(a.values[2], b.values[2]).statistic
        assert f"{rank:.2f}".replace("-", "−") in visit.text(".compare-head")
        page.wait_for_selector(".strip")
        mean = np.mean([spearmanr(a.values[q], b.values[q]).statistic for q in range(Q)])
        assert f"{mean:.2f}".replace("-", "−") in visit.text(".overall")
        assert page.locator(".rankings .ranking").count() == 4
        page.keyboard.press("j")
        visit.until(lambda: visit.text(".compare-head h2") == "Query 3")
        # sizes that are not calibrated are shares, not numbers of one unit
        assert page.locator(".scatter").first.get_by_text("relative to the strongest").count() == 2
        page.locator(".scatter .dot").nth(5).click()
        visit.until(lambda: "Training example" in visit.text("dialog"))


def test_a_notebook_frames_the_explorer(browser: Any, explorer: Running, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(explorer._repr_html_())

    class Notebook(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(tmp_path))

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Notebook) as notebook:
        threading.Thread(target=notebook.serve_forever, daemon=True).start()
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://localhost:{notebook.server_port}/")
        page.frame_locator("iframe").locator("h2").first.wait_for()
        assert page.frame_locator("iframe").locator("h2").first.inner_text() == "Overview"
        notebook.shutdown()
        context.close()


def test_audit_list_and_export(browser: Any, explorer: Running, tmp_path: Path) -> None:
    own = np.random.default_rng(3).standard_normal(N)
    with Visit(browser, explorer, "#page=audit") as visit:
        page = visit.page
        first = page.locator("tbody .example-cell").first.inner_text()
        assert f"#{int(own.argmax())}" in first
        with page.expect_download() as download:
            page.get_by_text("Export as CSV").click()
        download.value.save_as(tmp_path / "audit.csv")
        lines = list(csv.DictReader((tmp_path / "audit.csv").open(newline="")))
        assert [int(line["example"]) for line in lines] == np.argsort(-own).tolist()
        page.select_option("#filter-audit", "first")
        visit.until(lambda: "mean harm" in visit.text("thead"))
        bars = page.locator(".histogram rect")  # from the least harm to the most
        assert "helpful" in str(bars.first.get_attribute("class"))
        assert "harmful" in str(bars.last.get_attribute("class"))


def test_what_if_is_predicted_retrained_and_judged(browser: Any, explorer: Running) -> None:
    made = scores()
    with Visit(browser, explorer, "#page=queries&row=4") as visit:
        page = visit.page
        page.get_by_role("button", name="Tick the helpful ones").click()
        assert visit.text("#ticked") == "10"
        ticked = made.helpful(4, 10).examples
        page.keyboard.press("7")
        visit.ready("whatif")
        effects = [made.removal_effect(q, ticked) for q in range(Q)]
        first = int(np.argmax(np.abs(effects)))
        assert f"query {first}" in page.locator("tbody tr").first.inner_text()
        shown = page.locator("tbody tr").first.locator(".value").first.inner_text()
        assert float(shown.replace("−", "-")) == pytest.approx(effects[first], rel=5e-3)

        Slow.waits.set()
        page.get_by_label("seeds").fill("2")
        page.get_by_role("button", name="Retrain without them").click()
        page.wait_for_selector("progress")
        visit.until(lambda: page.locator("progress").evaluate("bar => bar.value") > 0.02)
        page.get_by_role("button", name="Cancel").click()
        page.wait_for_selector(".job.cancelled")
        Slow.waits.clear()
        page.get_by_role("button", name="Resume").click()
        page.wait_for_selector(".charts.judged .dot", timeout=60_000)
        assert page.locator(".charts.judged .dot").count() == Q
        assert "done" in visit.text(".job .state")
        job = explorer.explorer.jobs
        assert job is not None
        outcome = job.outcome(job.all()[0])
        assert outcome is not None
        row = int(np.argmax(np.abs(outcome.change)))
        cells = page.locator(".result tbody tr").filter(has_text=f"query {row}").first.inner_text()
        assert f"{abs(outcome.change[row]):.2f}"[:3] in cells
        page.reload()
        page.wait_for_selector(".charts.judged .dot")

        # a job that ends between the answer for the page and the answer for the list
        def earlier(route: Any) -> None:
            answer = route.fetch()
            stale = answer.json() | {"judged": None, "state": "running"}
            route.fulfill(response=answer, json=stale)

        page.route(f"**/api/jobs/{job.all()[0].id}?*", earlier, times=1)
        page.reload()
        page.wait_for_selector(".charts.judged .dot")

        Slow.fails.set()
        try:
            page.locator(".result .link").first.click()
            page.get_by_role("button", name="Retrain without them").wait_for()
            page.get_by_label("seeds").fill("3")
            page.get_by_role("button", name="Retrain without them").click()
            page.wait_for_selector(".job.failed .notice")
        finally:
            Slow.fails.clear()
        assert "out of luck <script>" in visit.text(".job.failed .notice")
        page.locator(".job.failed").get_by_role("button", name="remove this").click()
        page.wait_for_selector(".job.failed", state="detached")


def test_nothing_in_the_data_is_run(browser: Any) -> None:
    data = [(f"{EVIL} {k}", k % 2) for k in range(N)]
    with start(
        {EVIL: scores(), "b": scores(1)}, train=data, query=data[:Q], classes=[EVIL, "other"]
    ) as explorer:
        for name in ("queries", "examples", "map", "compare", "audit", "whatif", "about"):
            with Visit(browser, explorer, f"#page={name}") as visit:
                visit.page.wait_for_timeout(150)
                if name == "queries":
                    assert "<script>" in visit.text(".query-head")
                    visit.page.locator(".card-face").first.click()
                    visit.until(lambda: "<script>" in visit.text("dialog"))
                assert (
                    visit.page.locator("body script, body svg[onload], img[onerror]").count() == 0
                )


def test_a_renderers_own_html_is_shown_and_its_scripts_are_not_run(browser: Any) -> None:
    def renderer(example: Any) -> HTML:
        return HTML(f"<b style='color: red'>{example}</b><script>document.title='owned'</script>")

    with (
        start({"a": scores()}, train=list(range(N)), renderer=renderer) as explorer,
        Visit(browser, explorer) as visit,
    ):
        bold = visit.page.locator(".card .example b").first
        assert bold.evaluate("one => getComputedStyle(one).color") == "rgb(255, 0, 0)"


def test_long_names_make_no_page_wider(browser: Any) -> None:
    long = "unbroken" * 12
    train, query = ([(long, f"{k % 2} {long}") for k in range(n)] for n in (N, Q))
    made = {f"{long} a": scores(), f"{long} b": scores(1)}
    with (
        start(made, train=train, query=query) as page,
        Visit(browser, page, viewport={"width": 400, "height": 800}) as visit,
    ):
        for key, name in enumerate(PAGES):
            visit.page.keyboard.press(str(key + 1))
            visit.ready(name)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= 400, name


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 760, 400])
def test_no_page_is_wider_than_the_window(
    browser: Any, explorer: Running, theme: str, width: int
) -> None:
    size = {"width": width, "height": 800}
    with Visit(browser, explorer, viewport=size, color_scheme=theme) as visit:
        page = visit.page
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground.strip("rgb()").split(","))) < 384) == (theme == "dark")
        page.get_by_role("button", name="Tick the harmful ones").click()
        for key, name in enumerate(PAGES):
            page.keyboard.press(str(key + 1))
            visit.ready(name)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            for tab in page.locator(".tab").all():  # not one leaves the screen
                box = tab.bounding_box()
                assert box and box["x"] >= 0 and box["x"] + box["width"] <= width, name


def test_other_pages_get_nothing(
    browser: Any, explorer: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of another port, in the browser that has the cookie."""
    statuses: list[int] = []
    refuse = Guard.refuse

    def noted(self: Guard, *asked: Any) -> tuple[int, str]:
        found = refuse(self, *asked)
        statuses.append(found[0])
        return found

    (tmp_path / "index.html").write_text("<title>other</title>")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(tmp_path))

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        context = browser.new_context()
        page = context.new_page()
        page.goto(explorer.url)
        page.goto(f"http://127.0.0.1:{other.server_port}/")
        monkeypatch.setattr(Guard, "refuse", noted)
        for options in ("{}", "{mode: 'no-cors'}", "{method: 'POST', mode: 'no-cors', body: '{}'}"):
            page.evaluate(
                f"fetch('{explorer.address}/api/jobs', {{credentials: 'include', ...{options}}})"
                ".then(r => r.text(), () => '')"
            )
        page.evaluate(
            f"""new Promise(done => {{ const s = document.createElement('script');
            s.onload = s.onerror = done; s.src = '{explorer.address}/static/explore.js';
            document.head.append(s); }})"""
        )
        assert statuses == [403] * 4
        other.shutdown()
        context.close()


def test_a_server_that_went_away_is_reported(browser: Any) -> None:
    explorer = start({"a": scores()})
    context = browser.new_context()
    page = context.new_page()
    page.goto(explorer.url + "#page=queries")
    page.wait_for_selector("html[data-ready]", state="attached")
    explorer.close()
    page.keyboard.press("j")
    page.wait_for_selector("main .notice")
    assert "is whence explore still running?" in page.inner_text("main")
    context.close()


def test_the_card_of_a_query_is_saved_as_svg_and_png(
    browser: Any, explorer: Running, tmp_path: Path
) -> None:
    with Visit(browser, explorer, "#page=queries&row=3") as visit:
        for name, start in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
            with visit.page.expect_download() as saved:
                visit.page.get_by_text(f"Card ({name})").click()
            saved.value.save_as(tmp_path / name)
            assert (tmp_path / name).read_bytes().startswith(start)
            assert saved.value.suggested_filename == f"query-3.{name.lower()}"


def test_an_example_is_shown_beside_the_query(browser: Any, explorer: Running) -> None:
    with Visit(browser, explorer, "#page=queries&row=3") as visit:
        visit.page.locator(".card-face").first.click()
        assert "query 3" in visit.page.locator("dialog thead").inner_text()
        assert visit.page.locator("dialog input[data-place]").count() == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_fault(browser: Any, explorer: Running, theme: str) -> None:
    pages = ("overview", "queries", "examples", "map", "compare", "audit", "whatif", "about")
    with Visit(browser, explorer, color_scheme=theme, bypass_csp=True) as visit:
        visit.page.get_by_role("button", name="Tick the helpful ones").click()
        for key, name in enumerate(pages, 1):
            visit.page.keyboard.press(str(key))
            visit.ready(name)
            assert violations(visit.page) == [], name
