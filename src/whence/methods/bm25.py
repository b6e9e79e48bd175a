"""BM25 (Robertson & Zaragoza, 2009): the words that a query and an example share. No model at all.

    values[q, m] = ± Σ_{w in q} idf(w) tf(w, m) (k₁ + 1) / (tf(w, m) + k₁ L(m))
    L(m) = 1 - b + b |m| / mean |m|
    idf(w) = ln(1 + (N - df(w) + ½) / (df(w) + ½))

tf counts a word in an example, df the examples that have it; a word that a query repeats counts
each time. For language models it is a strong baseline of fact tracing (Akyürek et al., 2022). The
sign is that of `RepSim`: more alike counts as more helpful.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.data import Batches, cut
from whence.engine.queries import Queries
from whence.engine.workspace import Workspace
from whence.errors import InvalidInput, check_share
from whence.layers.passes import OUTPUTS, Passes, Weights
from whence.methods.similarity import Similarity

WORDS = re.compile(r"\w+")


@dataclass
class Corpus:
    """How many examples have each word, and how long examples are."""

    workspace: Workspace
    examples: int = 0
    words: int = 0
    having: Counter[Any] = field(default_factory=Counter)
    columns: dict[Any, int] = field(default_factory=dict)  # of each word of the examples

    def add(self, counts: Counter[Any]) -> None:
        self.examples, self.words = self.examples + 1, self.words + counts.total()
        self.having.update(counts.keys())

    def idf(self, word: Any) -> float:
        return float(
            np.log1p((self.examples - self.having[word] + 0.5) / (self.having[word] + 0.5))
        )


class BM25(Similarity):
    """The similarity of two texts by the words they share, rare ones more.

    Args:
        field: the name of an example's field that has its text, which is cut into words, in lower
            case. Default: the token ids of the batch are the words.
        k1: how soon repetitions of a word stop counting.
        b: how much longer examples are discounted, from 0 to 1.
        stage: attribute to this stage's examples only (default: all stages).
    """

    _depends_on = OUTPUTS

    def __init__(
        self, field: str | None = None, k1: float = 1.2, b: float = 0.75, stage: str | None = None
    ) -> None:
        check_share("b", b)
        if not (isinstance(k1, (int, float)) and k1 >= 0):
            raise InvalidInput(f"k1={k1!r} must be zero or positive")
        self.field, self.k1, self.b, self.stage = field, float(k1), float(b), stage

    def prepare(self, workspace: Workspace) -> Corpus:
        corpus = Corpus(workspace)
        for stage in workspace.stages:
            data = workspace.scored_data(stage)
            for block in cut(len(data), workspace.batch_size):
                for counts in self._counts(workspace.passes[stage], data, block):
                    corpus.add(counts)
        corpus.columns |= {word: k for k, word in enumerate(corpus.having)}
        return corpus

    def features(
        self, prepared: Corpus, examples: Queries, checkpoint: Weights, as_query: bool
    ) -> Tensor:
        """A sparse matrix (n, words): a query's idf, or an example's weights."""
        rows, columns, values, workspace = [], [], [], prepared.workspace
        counted = [
            counts
            for block in examples.batches(workspace.batch_size)
            for counts in self._counts(workspace.passes[examples.stage], examples.data, block)
        ]
        mean = prepared.words / prepared.examples
        for row, counts in enumerate(counted):
            long = self.k1 * (1 - self.b + self.b * counts.total() / mean)
            for word, tf in counts.items():
                if word in prepared.columns:  # no example has the others
                    weight = (
                        tf * prepared.idf(word) if as_query else tf * (self.k1 + 1) / (tf + long)
                    )
                    rows.append(row)
                    columns.append(prepared.columns[word])
                    values.append(weight)
        shape = len(examples), len(prepared.columns)
        return torch.sparse_coo_tensor(
            torch.tensor([rows, columns]),
            torch.tensor(values, dtype=torch.float64),
            shape,
            check_invariants=True,
        ).coalesce()

    def compare(self, queries: Tensor, examples: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse (CSR tensor support|invariant checks)")
            shared: Tensor = torch.sparse.mm(queries, examples.t())
        return shared.to_dense()

    def passes_needed(self, workspace: Workspace) -> tuple[dict[str, float], dict[str, int]]:
        return {"words": 0.0}, {"words": 2}

    def _counts(self, passes: Passes, data: Batches, indices: np.ndarray) -> list[Counter[Any]]:
        """How often each example has each word."""
        if self.field is not None:
            texts = [data.dataset[int(k)] for k in indices]
            if not all(
                isinstance(t, Mapping) and isinstance(t.get(self.field), str) for t in texts
            ):
                raise InvalidInput(f"{data.name} examples have no text in a field {self.field!r}")
            return [Counter(WORDS.findall(text[self.field].lower())) for text in texts]
        batch = data.take(indices)
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        ids = ids[0] if isinstance(ids, (tuple, list)) else ids
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            raise InvalidInput(f"{data.name} has no token ids, (n, t): name its text, BM25(field=)")
        mask = passes.task.mask(batch)
        exists = torch.ones_like(ids) if mask is None else mask
        return [Counter(i[e != 0].tolist()) for i, e in zip(ids, exists, strict=True)]
