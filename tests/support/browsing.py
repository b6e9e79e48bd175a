"""Pages in a real Chromium: what the browser tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
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
