"""Draw the report's screenshot and card, and write the live report of the front page, from the
demo's pictures: python -m tools.figures.report

Needs Playwright and Chromium (`/usr/bin/chromium`, or set CHROMIUM).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from playwright.sync_api import sync_playwright

import whence
from whence.demo import CLASSES, network, pictures, recipe_for

FIGURES = Path(__file__).parents[2] / "docs/figures"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
LIVE = Path(__file__).parents[2] / "docs/live/report.html"
SHOWN = 60  # queries of the live report
WORST = 222  # a shirt that is read as a bag


def report(folder: Path) -> Path:
    """The demo's training and SOURCE, by segment; the picture is of the worst query."""
    data = pictures(0)
    recipe = recipe_for(data.train)
    study = whence.Study(network(), recipe.task, data.train, recipe.run(0, folder / "run"))
    method = whence.Source(segments=3)
    scores = method.attribute(study, data.query, by_segment=True, progress=False)
    scores.card(WORST, study=study, data=data.query, classes=CLASSES).save(FIGURES / "card.svg")
    options = {"query": data.query, "study": study, "classes": CLASSES}
    options["title"] = "Clothes, a fifth mislabelled"
    hardest = np.argsort([min(scores.values[row].min(), 0.0) for row in range(len(data.query))])
    LIVE.parent.mkdir(exist_ok=True)
    scores.report(LIVE, queries=[WORST, *hardest[: SHOWN - 1].tolist()], k=6, **options)
    return scores.report(folder / "report.html", **options)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = report(Path(folder))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(path.as_uri() + "#queries")
        page.wait_for_selector("html[data-ready]", state="attached")
        page.select_option(".sidebar select", "measurement")
        page.locator(".query-item").first.click()
        page.wait_for_timeout(300)
        page.screenshot(path=FIGURES / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
