"""Draw the report's screenshot and card, from the demo's pictures: python -m tools.figures.report

Needs Playwright and Chromium (`/usr/bin/chromium`, or set CHROMIUM).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

from tools.live_report import WORST, demo_scores

FIGURES = Path(__file__).parents[2] / "docs/figures"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


def report(folder: Path) -> Path:
    """The report; the card is of the worst query."""
    scores, shown = demo_scores(folder)
    study, data, classes = (shown[name] for name in ("study", "query", "classes"))
    scores.card(WORST, study=study, data=data, classes=classes).save(FIGURES / "card.svg")
    return scores.report(folder / "report.html", **shown)


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
