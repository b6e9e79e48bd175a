"""Ctrl-C at a chosen moment."""

from __future__ import annotations

from typing import Any

import pytest


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> list[str]:
    """Make one call of a function, by its number from 1, raise KeyboardInterrupt; all others work.

    Returns a list that grows with every call.
    """
    original, calls = getattr(owner, name), []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls
