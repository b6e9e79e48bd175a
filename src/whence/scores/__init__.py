"""The result of an attribution."""

from whence.scores.means import ensemble
from whence.scores.result import Entry, Ranking, Scores, Top
from whence.scores.writer import ScoreWriter

__all__ = ["Entry", "Ranking", "ScoreWriter", "Scores", "Top", "ensemble"]
