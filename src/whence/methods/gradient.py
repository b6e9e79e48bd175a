"""What SOURCE, influence functions and TracIn share: scores that are linear in training gradients.

    values[q, m] = Σ_terms Σ_{c in term} ⟨w_{term,q}, ∇L(m, θ_c)⟩

A method says which checkpoints form its terms and what the vectors w are; this file computes the inner products, in blocks of
queries and examples that fit in memory, each block written once and never twice.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from whence.curvature import cost, key_of
from whence.curvature.fit import accumulator
from whence.data import Batches, cut
from whence.methods.bench import LOSS, Bench, Readouts, Term, allowance
from whence.run import Run
from whence.scores import Scores, ScoreWriter
from whence.study import Study

CHUNK = 1024  # examples between two notes of progress


class GradientMethod(ABC):
    """A method whose scores are inner products of query vectors with training gradients."""

    stage: str | None = None

    # -- what a method defines -----------------------------------------------------------------

    @abstractmethod
    def terms(self, bench: Bench) -> list[Term]:
        """Which checkpoints' training gradients count, in the order of training."""

    @abstractmethod
    def prepare(self, bench: Bench, terms: list[Term]) -> Any:
        """Fit what the vectors need; called once per run."""

    @abstractmethod
    def vectors(
        self,
        bench: Bench,
        prepared: Any,
        data: Batches,
        stage: str,
        indices: np.ndarray,
        examples: int,
    ) -> list[Readouts]:
        """The vectors w of these queries, one set per term, ready for about so many examples a term."""

    def passes_needed(self, bench: Bench) -> dict[str, int]:
        """How many passes of each kind over the training data, for the estimate."""
        return {"scores": sum(len(term.checkpoints) for term in self.terms(bench))}

    # -- what all of them do -------------------------------------------------------------------

    def attribute(
        self,
        study: Study,
        query: Any = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        batch_size: int | None = None,
        memory: int | str | None = None,
        out: str | os.PathLike[str] | None = None,
        top: int | None = None,
        progress: bool = True,
        by_segment: bool = False,
        workers: int = 0,
    ) -> Scores:
        """Scores of every training example for every query.

        Args:
            query: map-style dataset built like the training data; None is self-influence, shape (n,).
            device: where to compute (default: where the model is).
            dtype: float32, float64, or bfloat16 for the products (sums stay in float32).
            batch_size: examples per pass (default: chosen from memory). No score depends on it.
            memory: what may be used, in bytes or like "8GB" (default: 40 % of what is free).
            out: folder for the scores, written block by block; the same call again goes on from there.
            top: keep only each query's so many most helpful and most harmful examples.
            by_segment: keep the contribution of each segment (TracIn: of each checkpoint).
            workers: processes that load data.
        """
        runs = [
            self._bench(study, run, query, device, dtype, batch_size, memory, progress, workers)
            for run in study.runs[:1]
        ]
        return self._one(runs[0], out, top, by_segment, progress)

    def _bench(
        self,
        study: Study,
        run: Run,
        query: Any,
        device: torch.device | str | None,
        dtype: torch.dtype,
        batch_size: int | None,
        memory: int | str | None,
        progress: bool,
        workers: int,
    ) -> Bench:
        if self.stage is not None and self.stage not in study.stages:
            raise ValueError(f"stage={self.stage!r} is not in the run: it has {study.stages}")
        where = (
            torch.device(device) if device is not None else next(study.model.parameters()).device
        )
        data = None if query is None else study.query(query)
        passes = study.passes(run, device=where, dtype=dtype, workers=workers, progress=progress)
        allowed = allowance(memory, where)
        if batch_size is None:
            numbers = cost.per_example_numbers(passes[study.stages[-1]].tracked) * dtype.itemsize
            cap, share = (512, 2**28) if where.type == "cpu" else (4096, 2**33)
            batch_size = int(min(cap, max(1, min(share, allowed // 4) // numbers)))
            batch_size = 1 << (batch_size.bit_length() - 1)
        elif batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        stages = study.stages if self.stage is None else [self.stage]
        return Bench(study, run, data, stages, passes, batch_size, allowed)

    def _one(
        self,
        bench: Bench,
        out: str | os.PathLike[str] | None,
        top: int | None,
        by_segment: bool,
        progress: bool,
    ) -> Scores:
        terms = self.terms(bench)
        queries = 1 if bench.query is None else len(bench.query)
        examples = sum(len(bench.study.data[stage]) for stage in bench.stages)
        writer = ScoreWriter(
            None if out is None else Path(out),
            queries,
            examples,
            key=self._key(bench, top, by_segment),
            segments=len(terms) if by_segment else None,
            top=top,
        )
        if writer.already is not None:
            return writer.already
        self._announce(bench, queries, examples, progress)
        prepared = self.prepare(bench, terms)
        shares = np.zeros(len(terms))
        with bench.any.clock("scores"), torch.no_grad():
            if bench.query is None:
                self._score_self(bench, terms, prepared, writer, by_segment, shares)
            else:
                self._score(bench, terms, prepared, writer, by_segment, shares)
        return writer.finish(**self._metadata(bench, shares))

    def _key(self, bench: Bench, top: int | None, by_segment: bool) -> str:
        tracked = bench.any.tracked
        return key_of(
            {
                "method": repr(self),
                "run": bench.run.fingerprint,
                "train": {
                    s: bench.study.identity(bench.run, s, tracked) for s in bench.study.stages
                },
                "query": None if bench.query is None else bench.query.fingerprint(),
                "dtype": str(bench.any.dtype),
                "top": top,
                "by_segment": by_segment,
            }
        )

    def _announce(self, bench: Bench, queries: int, examples: int, progress: bool) -> None:
        """An estimate of time and memory, kept with the scores and shown before long work."""
        tracked, dtype = bench.any.tracked, bench.any.dtype
        work = cost.pass_operations(tracked, queries if bench.query is not None else 1)
        passes = self.passes_needed(bench)
        operations = examples * sum(work[kind] * count for kind, count in passes.items())
        seconds = 1.5 * operations / cost.rate(bench.any.device, dtype)
        held = (
            2 * cost.factor_numbers(tracked) + queries * cost.vector_numbers(tracked)
        ) * dtype.itemsize
        bench.diagnostics["estimate"] = {
            "seconds": seconds,
            "bytes": min(held, bench.memory),
            "passes": passes,
        }
        if progress and seconds > 10:
            gib = min(held, bench.memory) / 2**30
            kinds = ", ".join(f"{count} × {kind}" for kind, count in passes.items())
            tqdm.write(
                f"{self!r}: {examples:,} examples, {queries:,} queries; passes: {kinds}; "
                f"about {_duration(seconds)} and {gib:.1f} GiB"
            )

    def _score(
        self,
        bench: Bench,
        terms: list[Term],
        prepared: Any,
        writer: ScoreWriter,
        by_segment: bool,
        shares: np.ndarray,
    ) -> None:
        assert bench.query is not None
        count = len(bench.query)
        columns = _columns(bench)
        bar = tqdm(
            total=count * columns[-1][2].stop,
            desc="scores",
            unit="score",
            unit_scale=True,
            disable=not bench.any.progress,
            leave=False,
        )
        with bar:
            for rows in cut(count, self._queries_at_once(bench, len(terms))):
                where = slice(int(rows[0]), int(rows[-1]) + 1)
                todo = [c for c in columns if not writer.done(where, c[2])]
                if todo:
                    sizes = sum(len(indices) for _, indices, _ in todo)
                    ready = self.vectors(
                        bench, prepared, bench.query, bench.study.stages[-1], rows, sizes
                    )
                bar.update(len(rows) * (columns[-1][2].stop - sum(len(i) for _, i, _ in todo)))
                for stage, indices, place in todo:
                    block = torch.zeros(
                        len(terms),
                        len(rows),
                        len(indices),
                        dtype=accumulator(bench.any.dtype),
                        device=bench.any.device,
                    )
                    for k, term in enumerate(terms):
                        if term.stage == stage:
                            self._add(bench, term, ready[k], indices, block[k])
                    self._write(writer, where, place, block, by_segment, shares)
                    bar.update(len(rows) * len(indices))

    def _add(
        self,
        bench: Bench,
        term: Term,
        readouts: Readouts,
        indices: np.ndarray,
        total: Tensor,
        paired: bool = False,
    ) -> None:
        """total (q, n) += Σ_{c in term} ⟨w_q, ∇L(m, θ_c)⟩; paired: total (1, n), w_m with its own m."""
        data = bench.study.data[term.stage]
        blocks = [indices[b] for b in cut(len(indices), bench.batch_size)]
        for checkpoint in term.checkpoints:
            bench.load(checkpoint)
            start = 0
            for sweep in bench.passes[term.stage].sweeps(data, blocks, LOSS):
                here = slice(start, start + len(sweep.indices))
                for _, pairs in sweep.pairs:
                    for pair in pairs:
                        readout = readouts[pair.block.name]
                        if paired:
                            total[0, here] += readout.paired(pair.a, pair.s, here)
                        else:
                            readout.add_inner(total[:, here], pair.a, pair.s)
                start = here.stop

    def _score_self(
        self,
        bench: Bench,
        terms: list[Term],
        prepared: Any,
        writer: ScoreWriter,
        by_segment: bool,
        shares: np.ndarray,
    ) -> None:
        step = self._queries_at_once(bench, len(terms))
        for stage, indices, place in tqdm(
            _columns(bench, step),
            desc="self-influence",
            disable=not bench.any.progress,
            leave=False,
        ):
            if writer.done(slice(0, 1), place):
                continue
            ready = self.vectors(
                bench, prepared, bench.study.data[stage], stage, indices, len(indices)
            )
            block = torch.zeros(
                len(terms),
                1,
                len(indices),
                dtype=accumulator(bench.any.dtype),
                device=bench.any.device,
            )
            for k, term in enumerate(terms):
                if term.stage == stage:
                    self._add(bench, term, ready[k], indices, block[k], paired=True)
            self._write(writer, slice(0, 1), place, block, by_segment, shares)

    def _write(
        self,
        writer: ScoreWriter,
        rows: slice,
        place: slice,
        block: Tensor,
        by_segment: bool,
        shares: np.ndarray,
    ) -> None:
        values = block.sum(0).cpu().numpy()
        shares += block.abs().sum((1, 2), dtype=torch.float64).cpu().numpy()
        writer.write(rows, place, values, block.cpu().numpy() if by_segment else None)

    def _queries_at_once(self, bench: Bench, terms: int) -> int:
        itemsize = accumulator(bench.any.dtype).itemsize
        each = (terms + 2) * cost.vector_numbers(bench.any.tracked) * itemsize
        return int(max(1, bench.memory // 2 // each))

    def _metadata(self, bench: Bench, shares: np.ndarray) -> dict[str, Any]:
        study, tracked = bench.study, bench.any.tracked
        task = study.tasks[study.stages[-1]]
        for segment, share in zip(
            bench.diagnostics.get("segments", []), shares / (shares.sum() or 1.0), strict=False
        ):
            segment["share_of_score"] = float(share)
        clock = bench.any.clock
        bench.diagnostics |= {
            "seconds": clock.seconds,
            "cpu_seconds": clock.cpu_seconds,
            "batch_size": bench.batch_size,
            "tracked": tracked.summary(),
        }
        counts = {stage: len(study.data[stage]) for stage in bench.stages}
        return {
            "method": type(self).__name__,
            "settings": self.settings(),
            "measurement": task.measurement,
            "unit": task.unit,
            "higher_is_better": task.higher_is_better,
            "query_ids": None if bench.query is None else np.arange(len(bench.query)),
            "train_ids": np.concatenate([np.arange(count) for count in counts.values()]),
            "stage": [s for s, c in counts.items() for _ in range(c)]
            if len(study.stages) > 1
            else None,
            "diagnostics": bench.diagnostics,
            "provenance": {
                "run": bench.run.fingerprint,
                "torch": torch.__version__,
                "device": str(bench.any.device),
                "dtype": str(bench.any.dtype),
            },
            "excluded": [asdict(e) for e in tracked.excluded],
        }

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_")}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.settings().items())})"
        )


def _columns(bench: Bench, size: int | None = None) -> list[tuple[str, np.ndarray, slice]]:
    """Chunks of examples: (stage, indices in its dataset, columns of the score matrix)."""
    chunk = size or max(CHUNK, 4 * bench.batch_size) // bench.batch_size * bench.batch_size
    found, offset = [], 0
    for stage in bench.stages:
        count = len(bench.study.data[stage])
        for indices in cut(count, chunk):
            found.append(
                (stage, indices, slice(offset + int(indices[0]), offset + int(indices[-1]) + 1))
            )
        offset += count
    return found


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
