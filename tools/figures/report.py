"""Draw the screenshot of the report, from the demo's digits: python -m tools.figures.report

Needs Playwright and Chromium (`/usr/bin/chromium`, or set CHROMIUM).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright
from torch.utils.data import DataLoader

import whence
from whence.demo import BATCH, EPOCHS, TRAIN, digits, network, train

FIGURES = Path(__file__).parents[2] / "docs/figures"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


def report(folder: Path) -> Path:
    """The demo's training and SOURCE, by segment; the picture is of the worst query."""
    data = digits(0)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    loader = DataLoader(data.train, BATCH, shuffle=True)
    steps = len(loader) * EPOCHS
    with whence.Recorder(
        folder / "run", model, optimizer, checkpoints=6, total_steps=steps, size=TRAIN
    ):
        train(model, optimizer, loader, progress=False)
    study = whence.Study(model, whence.Classification(), train=data.train, runs=folder / "run")
    scores = whence.Source(segments=3).attribute(study, data.test, by_segment=True, progress=False)
    return scores.report(
        folder / "report.html", query=data.test, study=study, title="Digits, a tenth mislabelled"
    )


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = report(Path(folder))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        page.select_option(".sidebar select", "measurement")
        page.locator(".query-item").first.click()
        page.wait_for_timeout(300)
        page.screenshot(path=FIGURES / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
