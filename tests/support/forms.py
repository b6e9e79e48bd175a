"""Forms of SOURCE that the brute force knows."""

from __future__ import annotations

from typing import Any

import whence

UNCOUPLED = {"curvature": "ekfac", "coupling": False, "query_at": "final", "floor": 0.0}


def exact(*args: Any, method: Any = whence.Source, **settings: Any) -> whence.Source:
    """Appendix C without the diagonal approximation and without an inverse."""
    names = ("segments", "curvature", "fisher")
    given = dict(zip(names, args, strict=False))
    form: whence.Source = method(**(UNCOUPLED | given | settings))
    return form
