"""Draw the screenshots of the explorer, from the demo's pictures: python -m tools.figures.explore

Needs Playwright and Chromium (`/usr/bin/chromium`, or set CHROMIUM).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright
from torch.utils.data import Subset

import whence
from whence.demo import CLASSES, network, pictures, recipe_for
from whence.explore import Running, start

FIGURES = Path(__file__).parents[2] / "docs/figures"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
QUERIES = 100


def explorer(folder: Path) -> Running:
    """The demo's pictures by a recipe, with the scores of three methods and self-influence."""
    data = pictures(0)
    query = Subset(data.query, range(QUERIES))
    recipe = recipe_for(data.train)
    run = recipe.run(0, folder / "run", device="cpu")
    study = whence.Study(network(), recipe.task, data.train, run)
    source = whence.Source(segments=3)
    scores = {
        "SOURCE": source.attribute(study, query, by_segment=True, progress=False),
        "influence functions": whence.Influence(damping="source").attribute(
            study, query, progress=False
        ),
        "TracIn": whence.TracIn().attribute(study, query, progress=False),
        "self-influence": source.attribute(study, None, progress=False),
    }
    options = {"study": study, "query": query, "recipe": recipe, "classes": CLASSES}
    return start(scores, out=folder / "explore", **options)


def open_view(page: Any, key: str, name: str) -> None:
    page.keyboard.press(key)
    page.wait_for_selector(f'html[data-ready="{name}"]', state="attached")
    page.wait_for_timeout(600)


def main() -> None:
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        explorer(Path(folder)) as served,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(served.url + "#page=queries")
        page.wait_for_selector("html[data-ready]", state="attached")
        page.get_by_label("wrong only").check()
        page.wait_for_timeout(600)
        page.locator(".query-item").first.click()
        page.wait_for_timeout(600)
        page.get_by_role("button", name="Tick the helpful ones").click()
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(600)
        page.screenshot(path=FIGURES / "explore.png")
        open_view(page, "6", "audit")
        page.screenshot(path=FIGURES / "explore-audit.png")
        open_view(page, "7", "whatif")
        page.get_by_label("seeds").fill("10")
        page.get_by_role("button", name="Retrain without them").click()
        page.wait_for_selector(".charts.judged .dot", timeout=120_000)
        page.wait_for_timeout(600)
        page.screenshot(path=FIGURES / "explore-whatif.png")
        browser.close()


if __name__ == "__main__":
    main()
