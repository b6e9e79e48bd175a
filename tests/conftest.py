"""What holds for all tests."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.browsing import CHROMIUM
from support.speed import fix_speed

# Tiny matrices are fastest on one thread, and two test machines agree to the last bit on it.
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # as in a shell's background: what tests start, and interrupt, would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(autouse=True)
def no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_speed(monkeypatch.setattr)
