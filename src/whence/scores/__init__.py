"""The result of an attribution."""

from whence.scores.ensemble import ensemble
from whence.scores.result import BY_LAYER, BY_SEGMENT, Entry, Ranking, Scores, Top
from whence.scores.writer import ScoreWriter

__all__ = [
    "BY_LAYER",
    "BY_SEGMENT",
    "Entry",
    "Ranking",
    "ScoreWriter",
    "Scores",
    "Top",
    "ensemble",
]
