"""How fast report and explorer are in Chromium, on 1,000 queries × 60,000 training examples.

    python -m benchmarks.browser

Needs Playwright and Chromium (`/usr/bin/chromium`, or set CHROMIUM). Prints seconds from opening
the report to its first page, milliseconds of the explorer's answers, and the map's frames a second.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from playwright.sync_api import sync_playwright
from torch import nn
from torch.utils.data import TensorDataset

import whence
from whence.explore import start

QUERIES, EXAMPLES, FRAMES = 1000, 60_000, 120
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")

ANSWERS = """async ([path, times]) => {
  const token = document.querySelector('meta[name="whence-token"]').content;
  const taken = [];
  for (let k = 0; k < times; k += 1) {
    const begin = performance.now();
    const answer = await fetch(path.replace("ROW", k), { headers: { "x-whence-token": token } });
    await answer.json();
    if (!answer.ok) throw new Error(String(answer.status));
    taken.push(performance.now() - begin);
  }
  return taken;
}"""
PANNING = """(frames) => new Promise((done) => {
  const canvas = document.querySelector("canvas.map");
  let count = 0, begin = null;
  const step = (now) => {
    if (begin === null) begin = now;
    if (count === frames) { done(1000 * frames / (now - begin)); return; }
    const key = count % 2 ? "ArrowLeft" : "ArrowRight";
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    count += 1;
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""


def made(folder: Path) -> tuple[whence.Study, whence.Scores, TensorDataset]:
    """A study of noise, with scores of noise."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(EXAMPLES, 1, 8, 8, generator=random)
    train = TensorDataset(images, torch.arange(EXAMPLES) % 10)
    query = TensorDataset(images[:QUERIES], torch.arange(QUERIES) % 10)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    run = whence.Run.from_checkpoints([model.state_dict()], [10], 0.1)
    study = whence.Study(model, whence.Classification(), train, run)
    whence.Random().attribute(study, query, out=folder / "scores", progress=False)
    return study, whence.Scores.load(folder / "scores"), query


def main() -> None:
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        study, scores, query = made(folder)
        begin = time.perf_counter()
        path = scores.report(folder / "r.html", study=study, query=query)
        size = path.stat().st_size / 2**20
        print(f"report written in {time.perf_counter() - begin:.1f} s, {size:.1f} MiB")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        begin = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        print(f"report opened in {time.perf_counter() - begin:.2f} s")
        with start({"Random": scores}, study=study, query=query, out=folder / "jobs") as served:
            _explorer(page, served.url)
        browser.close()


def _explorer(page: Any, url: str) -> None:
    page.goto(f"{url}#page=map")
    page.wait_for_selector("canvas.map", timeout=300_000)
    page.wait_for_timeout(1000)
    print(f"map: {page.evaluate(PANNING, FRAMES):.0f} frames a second, {EXAMPLES:,} points")
    asked = {
        "query": "/api/query?scores=Random&row=ROW&k=10",
        "training data": "/api/examples?scores=Random&row=ROW",
        "overview": "/api/summary?scores=Random",
        "map": "/api/map/values?scores=Random&row=ROW",
        "what if": "/api/whatif?places=1,2,3,ROW",
        "audit": "/api/audit?scores=Random",
    }
    for what, path in asked.items():
        taken = np.array(page.evaluate(ANSWERS, [path, 20]))
        print(f"{what}: median {np.median(taken):.0f} ms, slowest {taken.max():.0f} ms")


if __name__ == "__main__":
    main()
