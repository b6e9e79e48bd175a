"""A published truth, and where new scores stand among the methods that were judged by it.

    FOLDER/
      benchmark.json            what it is, how to make its runs, its methods, and its files
      truth/                    a `Truth`: truth.json, masks.npy (M, n), measurements.npy (M, R, q)
      predictions/0.npy, ...    of each method, (K, q, M): sums of K runs' scores over the subsets

Nothing in it is unpickled. A folder may be on a web server: `Benchmark.download` fetches the files
that benchmark.json names, and compares their checksums.

Axes: ``n`` training examples, ``q`` queries, ``M`` subsets, ``R`` seeds, ``K`` runs.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from whence.errors import InvalidInput, MissingFile, WhenceError, whole
from whence.evaluate.groups import Given
from whence.evaluate.lds import LDS, Comparison, Difference, described, lds
from whence.persist.arrays import load_array, save_array
from whence.persist.files import (
    as_path,
    check_types,
    make_folder,
    parsing,
    read_json,
    write_bytes,
    write_json,
)
from whence.persist.identity import sha256_of
from whence.retrain import Truth
from whence.retrain.truth import FIELDS
from whence.table import Table, Tabled, estimate, one_line

SCHEMA = 1
DESCRIPTION = "benchmark.json"
LIMIT = 2**28  # bytes of a download
DESCRIPTION_LIMIT = 2**20
FILES = 1000  # of a download
TIMEOUT = 60.0  # seconds without an answer
SLOWEST = 2**14  # bytes per second on average, after the first minute
PIECE = 2**16  # bytes that are read at once
REMEDY = "publish the benchmark again, or delete the downloaded folder"


@dataclass(frozen=True, eq=False)
class Published:
    """A method that was judged by the truth.

    Attributes:
        predictions: (K, q, M), sums of its scores over the subsets, up to a constant of the query.
        settings: the method with its settings, as text.
        seconds: what the scores of one run took.
    """

    predictions: NDArray[np.floating[Any]]
    settings: str = ""
    seconds: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Standing(Tabled):
    """The LDS of new scores, and how far it is above each published method's.

    Attributes:
        result: of the new scores.
        published: the LDS of every method, each of one run: the mean over its runs.
        seconds: of every method, where they are known.
        name: of the benchmark.
    """

    result: LDS
    published: Comparison
    seconds: Mapping[str, float | None]
    name: str

    @property
    def differences(self) -> dict[str, Difference]:
        """The new LDS minus each published one, on the same resamples of the subsets."""
        return {name: self.result.minus(other) for name, other in self.published.items()}

    def table(self) -> Table:
        """The new scores among the published ones, best first."""
        rows: list[tuple[float, list[object]]] = []
        for name, method in self.published.items():
            seconds = self.seconds.get(name)
            cells = [name, estimate(method.value, method.interval), self.differences[name]]
            rows.append((method.value, [*cells, None if seconds is None else f"{seconds:.1f}"]))
        mine = estimate(self.result.value, self.result.interval)
        rows.append((self.result.value, [f"→ {self.result.method}", mine, None, None]))
        rows.sort(key=lambda row: -row[0])
        ceiling = self.result.ceiling
        top = "not known" if ceiling is None else f"{ceiling:.3f}"
        return Table(
            ["method", "LDS [95 %]", "→ minus it [95 %]", "seconds"],
            [cells for _, cells in rows],
            title=f"{self.name}: {described(self.result)}, {self.result.queries} queries",
            note=f"ceiling {top}. A difference whose interval contains 0 is not certain.",
        )


@dataclass(frozen=True, eq=False)
class Benchmark:
    """A truth that scores of any method can be judged by, and the methods that were.

    Attributes:
        name: in one word.
        truth: the retrained models.
        published: the methods, by name.
        about: text by name. "title", "setting" (model, data, training), "how" (how to make the
            runs), "source" (who made it, and when) are usual.
    """

    name: str
    truth: Truth
    published: Mapping[str, Published] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        subsets, _, queries = self.truth.measurements.shape
        for name, method in self.published.items():
            shape = method.predictions.shape
            if len(shape) != 3 or shape[1:] != (queries, subsets):
                raise InvalidInput(
                    f"the predictions of {name} have shape {shape}: give (K, {queries}, {subsets}),"
                    " for the truth's queries and subsets"
                )
            if not np.isfinite(method.predictions).all():
                raise InvalidInput(f"some predictions of {name} are not finite numbers")

    # -- judging ---------------------------------------------------------------------------------

    def score(
        self, scores: Given | Sequence[Given], *, bootstrap: int = 1000, seed: int = 0
    ) -> Standing:
        """Where scores stand among the published methods.

        Trainings that diverged are left out.

        Args:
            scores: of the benchmark's queries and training examples, in its order: a method's
                Scores, an array (q, n), or a list of them, one of each run; then the mean LDS of
                the runs counts.
            bootstrap, seed: as in `lds`.
        """
        how: Any = {"bootstrap": bootstrap, "seed": seed, "exclude_diverged": True}
        result = lds(scores, self.truth, **how)
        # a subset that contains one stand-in example: its prediction is that example's score
        about = {name: getattr(self.truth, name) for name in FIELDS}
        measurements = self.truth.measurements
        stand_in = Truth(np.eye(len(measurements), dtype=bool), measurements, **about)
        published = {}
        for name, method in self.published.items():
            results = lds(list(np.asarray(method.predictions, np.float64)), stand_in, **how)
            published[name] = replace(results.single or results, method=name)
        seconds = {name: method.seconds for name, method in self.published.items()}
        return Standing(result.single or result, Comparison(published), seconds, self.name)

    # -- folders ---------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a folder that `open` reads, and that a web server may offer."""
        folder = as_path(path)
        make_folder(folder / "predictions")
        self.truth.save(folder / "truth")
        methods: dict[str, dict[str, Any]] = {}
        for k, (name, published) in enumerate(self.published.items()):
            file = f"predictions/{k}.npy"
            entry = save_array(folder / file, np.asarray(published.predictions, np.float32))
            about = {"settings": published.settings, "seconds": published.seconds}
            methods[name] = about | {"file": file, "array": entry}
        truth = [f"truth/{name}" for name in ("truth.json", "masks.npy", "measurements.npy")]
        names = [*truth, *(method["file"] for method in methods.values())]
        files = {name: _identity((folder / name).read_bytes()) for name in names}
        content = {"schema": SCHEMA, "name": self.name, "protocol": self.truth.protocol}
        sizes = {"examples": self.truth.masks.shape[1]}
        sizes |= dict(
            zip(("subsets", "seeds", "queries"), self.truth.measurements.shape, strict=True)
        )
        content |= {"sizes": sizes, "about": dict(self.about), "methods": methods, "files": files}
        write_json(folder / DESCRIPTION, content)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Benchmark:
        """Open what `save` wrote."""
        folder = as_path(path)
        file = folder / DESCRIPTION
        if not file.is_file():
            raise MissingFile(
                f"{folder} has no {DESCRIPTION}: give a folder that Benchmark.save wrote"
            )
        content = read_json(file, schema=SCHEMA, remedy=REMEDY)
        with parsing(file, REMEDY):
            check_types(content, name=str, about=dict, methods=dict, files=dict)
            published = {}
            for name, method in content["methods"].items():
                check_types(method, settings=str, seconds=(int, float, type(None)), array=dict)
                place = folder / _inside(method["file"])
                predictions = load_array(place, method["array"], remedy=REMEDY)
                published[name] = Published(predictions, method["settings"], method["seconds"])
            about = {str(name): str(text) for name, text in content["about"].items()}
        return cls(content["name"], Truth.load(folder / "truth"), published, about)

    @classmethod
    def download(
        cls,
        url: str,
        cache: str | os.PathLike[str] | None = None,
        *,
        limit: int = LIMIT,
    ) -> Benchmark:
        """Fetch a benchmark's folder from a web server, and open it.

        The files go to a folder of the cache, named by what benchmark.json says. Files that are
        there already, with the right checksum, are not fetched again.

        Args:
            url: of the folder that contains benchmark.json; http or https.
            cache: folder (default: whence in $XDG_CACHE_HOME, or in ~/.cache).
            limit: bytes that all files together may have.
        """
        if _scheme(url) not in ("http", "https"):
            raise InvalidInput(f"url={url!r} must start with https:// or http://")
        address = url.removesuffix(DESCRIPTION).rstrip("/")
        raw = _fetched(f"{address}/{DESCRIPTION}", DESCRIPTION_LIMIT)
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        base = Path(home, "whence", "benchmarks") if cache is None else as_path(cache)
        folder = base / sha256_of(raw)[:16]
        make_folder(folder)
        write_bytes(folder / DESCRIPTION, raw)
        content = read_json(folder / DESCRIPTION, schema=SCHEMA, remedy=REMEDY)
        with parsing(folder / DESCRIPTION, REMEDY):
            files = {_inside(name): dict(file) for name, file in content["files"].items()}
            if len(files) > FILES:
                raise InvalidInput(f"it names {len(files):,} files, more than {FILES:,}")
            for file in files.values():
                whole("bytes", file["bytes"], 0)
            total = sum(file["bytes"] for file in files.values())
        if total > limit:
            raise InvalidInput(
                f"{url} has {total:,} bytes, and limit={limit:,}: raise the limit if you trust it"
            )
        for name, expected in files.items():
            place = folder / name
            if place.is_file() and _identity(place.read_bytes()) == expected:
                continue
            data = _fetched(f"{address}/{name}", int(expected["bytes"]))
            if _identity(data) != expected:
                raise InvalidInput(
                    f"{address}/{name} is not what {DESCRIPTION} describes (its size or checksum "
                    "differs): it was changed, or damaged on the way"
                )
            make_folder(place.parent)
            write_bytes(place, data)
        return cls.open(folder)


def score_against(
    source: str | os.PathLike[str] | Benchmark,
    scores: Given | Sequence[Given],
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    limit: int = LIMIT,
) -> Standing:
    """Judge scores by a published benchmark.

    Args:
        source: a folder that `Benchmark.save` wrote, or the URL of one (http or https), which is
            then downloaded; or a `Benchmark`.
        scores, bootstrap, seed: as in `Benchmark.score`.
        limit: bytes of a download.
    """
    if isinstance(source, Benchmark):
        return source.score(scores, bootstrap=bootstrap, seed=seed)
    text = os.fspath(source)
    if _scheme(text) in ("http", "https"):
        benchmark = Benchmark.download(text, limit=limit)
    else:
        benchmark = Benchmark.open(text)
    return benchmark.score(scores, bootstrap=bootstrap, seed=seed)


def _identity(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": sha256_of(data)}


def _inside(name: Any) -> str:
    """A name of a file in the folder; refuses one that leads out of it."""
    path = PurePosixPath(str(name))
    plain = all(part not in ("", ".", "..") for part in str(name).split("/"))
    if path.is_absolute() or not plain or "\\" in str(name) or ":" in str(name):
        raise InvalidInput(f"{name!r} is not the name of a file in the benchmark's folder")
    return str(name)


def _scheme(url: str) -> str:
    try:
        return urlsplit(url).scheme
    except ValueError:  # such as "http://[::1"
        return ""


def _fetched(url: str, most: int) -> bytes:
    """The content of a URL, of at most this many bytes. Gives up on a server that is too slow."""
    pieces, size, begun = [], 0, time.monotonic()
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            while piece := answer.read1(min(PIECE, most + 1 - size)):
                pieces.append(piece)
                size += len(piece)
                if size > most:
                    raise InvalidInput(f"{url} has more than the {most:,} bytes that are allowed")
                if time.monotonic() - begun > TIMEOUT + size / SLOWEST:
                    raise MissingFile(f"{url} sends too slowly: {size:,} bytes so far. Try later")
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, WhenceError):
            raise
        reason = one_line(f"{url} cannot be read ({error})")  # the server may have written it
        raise MissingFile(f"{reason}: check the address") from None
    return b"".join(pieces)
