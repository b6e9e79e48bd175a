"""Pages in a real Chromium: what the browser tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
#: `npm install axe-core`, in the root of the repository or elsewhere
AXE = Path(os.environ.get("AXE", "node_modules/axe-core/axe.min.js"))
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
EVIL = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</script><svg onload=\"document.title='owned'\"> \u202e right to left \u2066"
)


class Opened:
    """A page; whatever it complains of, or asks of the network, is kept."""

    def __init__(self, browser: Any, address: str, **context: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, **context}
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)


def violations(page: Any) -> list[Any]:
    """What axe-core finds wrong with a page, by the rules of WCAG AA.

    The page's context must have `bypass_csp`, or the script is refused.
    """
    if not AXE.exists():
        pytest.skip("axe-core is not installed: npm install axe-core, or set AXE")
    page.evaluate(AXE.read_text())
    asked = {"runOnly": RULES}
    result = page.evaluate("(asked) => axe.run(document, asked)", asked)["violations"]
    return [[v["id"], [n["target"] for n in v["nodes"]][:3]] for v in result]
