"""Start the explorer: load scores, data and recipe, choose a port, open a browser."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from whence.errors import InvalidInput, optional
from whence.explore.explorer import Explorer
from whence.explore.jobs import Jobs
from whence.explore.scored_data import Given, ScoredData, open_scores
from whence.persist.files import as_path
from whence.present.check import check_data
from whence.present.summary import judged
from whence.scores import Scores
from whence.table import escaped

if TYPE_CHECKING:
    from whence.retrain.recipe import Recipe
    from whence.retrain.truth import Truth
    from whence.study import Study

LOCAL = ("127.0.0.1", "localhost", "::1")
FOLDER = "explore"  # in the folder of the first scores
FRAME = 760  # pixels, the height in a notebook


class Running:
    """An explorer that runs in a thread, for notebooks, where `serve` would block.

        with whence.explore.start({"SOURCE": scores}, study=study, query=query) as page:
            print(page.url)

    Attributes:
        url: the address, with the token.
        explorer: computes the answers.
    """

    def __init__(self, explorer: Explorer, host: str, port: int, framed: bool = False) -> None:
        import uvicorn

        from whence.explore.server import Punctual, create_app

        self.explorer, self._token = explorer, secrets.token_urlsafe(32)
        self._socket = bind(host, port)
        self.port = int(self._socket.getsockname()[1])
        names = {"[::1]" if host == "::1" else "127.0.0.1", "localhost"}
        hosts = frozenset(f"{name}:{self.port}" for name in names)
        name = "[::1]" if host == "::1" else host
        self.address = f"http://{name}:{self.port}"
        self.url = f"{self.address}/?token={self._token}"
        config = uvicorn.Config(
            create_app(explorer, self._token, hosts, framed),
            log_level="critical",  # `server` reports errors of requests
            access_log=False,  # the first address contains the token
            lifespan="off",
            http=Punctual,
            h11_max_incomplete_event_size=2**17,  # a thousand ticked examples make a long address
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=3,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.run, name="explorer", daemon=True)

    @property
    def token(self) -> str:
        return self._token

    @property
    def started(self) -> bool:
        return bool(self._server.started)

    def run(self) -> None:
        """Answer requests until stopped (by Ctrl-C in the main thread)."""
        self.explorer.start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.explorer.close()
            self._socket.close()

    def start(self) -> Running:
        self._thread.start()
        while not self.started:
            if not self._thread.is_alive():
                raise RuntimeError(f"the explorer could not be started at {self.address}")
            time.sleep(0.01)
        return self

    def close(self) -> None:
        """Stop. The next start resumes a retraining that is running."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(30)
        elif not self.started:
            self.explorer.close()
            self._socket.close()

    def __repr__(self) -> str:
        return f"Running({self.url})"

    def _repr_html_(self) -> str:
        """The page in a frame. A notebook at localhost may show it; others only the link."""
        address = escape(self.url.replace("//127.0.0.1:", "//localhost:"))
        return (
            f'<iframe src="{address}" width="100%" height="{FRAME}" style="border:1px solid #ccc" '
            'title="whence explorer"></iframe>'
            f'<p><a href="{address}" target="_blank" rel="noreferrer">Open in a new tab</a></p>'
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Settings(TypedDict, total=False):
    """What to explore, and where, as keyword arguments; see `serve`."""

    train: Any
    query: Any
    study: Study | None
    recipe: Recipe | None
    truth: Truth | None
    labels: Any
    renderer: Callable[[Any], Any] | None
    classes: Sequence[str] | Mapping[int, str] | None
    columns: Sequence[str] | None
    tokenizer: Any
    check: bool
    host: str
    port: int
    out: str | os.PathLike[str] | None


def serve(scores: Given, *, open_browser: bool = True, **settings: Unpack[Settings]) -> None:
    """Explore scores in the browser, until Ctrl-C.

    Args:
        scores: Scores by name, or folders of them, or one of either; all of the same queries, or
            self-influence.
        train: the training data, or `{stage: dataset}` (default: the study's).
        query: the queries of the scores.
        study: shows the model's predictions.
        recipe: allows retraining without chosen examples.
        truth: judges the scores, and gives them the size of real changes.
        labels: of the training examples, or `{stage: labels}`, instead of those in the data.
        renderer: turns an example into what the page shows: text, image, row, or
            `whence.report.HTML`.
        classes, columns, tokenizer: names of classes and features, and the decoder of token ids.
        check: False compares only the number of examples (default: True), for data that is random,
            or texts shown instead of their tokens.
        host: an address of this machine (default: 127.0.0.1); the page is never served to a
            network.
        port: 0, the default, chooses a free one.
        open_browser: False only prints the address.
        out: folder for retrainings (default: `explore` in the first scores' folder, or
            `whence-explore` in the current one).
    """
    page = prepare(scores, **settings)
    print(escaped(f"Exploring at {page.url}"))
    if page.explorer.refused is None:
        jobs = page.explorer.jobs
        assert jobs is not None
        print(escaped(f"Retrainings are stored in {jobs.folder}."))
    else:
        print(escaped(f"Retraining is not available: {page.explorer.refused}."))
    print("Press Ctrl-C to stop.", flush=True)
    if open_browser:
        threading.Thread(target=_open, args=(page,), daemon=True).start()
    with suppress(KeyboardInterrupt):
        page.run()
    jobs = page.explorer.jobs
    cut = [] if jobs is None else [j for j in jobs.all() if j.state in ("running", "waiting")]
    print("\nStopped." + (" The next start resumes the retraining." if cut else ""))


def start(scores: Given, **settings: Any) -> Running:
    """`serve` in a thread, for notebooks. Close it when you are done.

    Takes the settings of `serve`, except `open_browser`.
    """
    return prepare(scores, framed=True, **settings).start()


def prepare(
    scores: Given,
    *,
    train: Any = None,
    query: Any = None,
    study: Study | None = None,
    recipe: Recipe | None = None,
    truth: Truth | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    out: str | os.PathLike[str] | None = None,
    framed: bool = False,
    **looks: Any,
) -> Running:
    """Check everything before anything is served.

    Args:
        framed: a page at localhost, such as a notebook, may show this one in a frame.
    """
    with optional("the explorer needs FastAPI and uvicorn", "explore"):
        import fastapi
        import uvicorn
    del fastapi, uvicorn
    if host not in LOCAL:
        raise InvalidInput(
            f"host={host!r} would show your training data to the network: the explorer only serves "
            f"this machine ({', '.join(LOCAL)}). From another machine, use a tunnel: "
            f"ssh -L PORT:localhost:PORT, with the same port on both sides"
        )
    named = open_scores(scores)
    judgements = {}
    if truth is not None:
        for name, given in named.items():
            if not given.is_self_influence:
                named[name], judgements[name] = judged(given, truth)
    data = ScoredData(named, train=train, query=query, study=study, **looks)
    folder = as_path(out) if out is not None else default_folder(scores)
    jobs, refused = make_jobs(data, recipe, query, folder)
    explorer = Explorer(data, jobs, refused, judgements)
    try:
        return Running(explorer, host, port, framed)
    except BaseException:
        explorer.close()
        raise


def default_folder(scores: Given) -> Path:
    if isinstance(scores, Scores | Mapping) or not scores:
        return Path("whence-explore")
    return Path(scores if isinstance(scores, str | os.PathLike) else scores[0]) / FOLDER


def make_jobs(
    data: ScoredData, recipe: Recipe | None, query: Any, folder: Path
) -> tuple[Jobs | None, str | None]:
    """The retrainings, or why there are none. Exploring works without them."""
    if recipe is None:
        return None, "there is no recipe (give recipe=, or define it in the study file)"
    if query is None or not data.sets:
        return None, "there are no queries to measure (give query= and scores of it)"
    train = {stage.name: stage.data.dataset for stage in recipe.stages}
    for name, scores in data.sets.items():
        task = recipe.task
        if (scores.measurement, scores.higher_is_better) != (
            task.measurement,
            task.higher_is_better,
        ):
            return None, (
                f"{name} are scores of the {scores.measurement}, but the recipe's task measures "
                f"the {task.measurement}: give a recipe with the task of the attribution"
            )
        try:
            check_data(scores, train, query, collate=recipe.collate)
        except ValueError as error:
            return None, f"the recipe does not fit {name}: {error}"
    try:
        return Jobs(folder, recipe, query), None
    except OSError as error:
        return None, f"{folder} cannot be written ({error.strerror}): choose another folder (out=)"
    except Exception as error:  # a user's recipe may raise anything
        return None, f"the recipe fails: {type(error).__name__}: {error}"


def bind(host: str, port: int) -> socket.socket:
    """A socket at the port; 0 chooses a free one."""
    if not 0 <= port < 2**16:
        raise InvalidInput(f"port={port}: use a number up to 65535, or 0 for a free port")
    bound = socket.socket(socket.AF_INET6 if host == "::1" else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(
                error.errno,
                f"port {port} is in use, perhaps by another explorer: close it, choose another "
                "port, or use port=0 for a free one",
            ) from error
        if error.errno == errno.EACCES:
            raise OSError(
                error.errno, f"you may not use port {port}: choose one above 1023, or 0"
            ) from error
        raise
    return bound


def _open(page: Running) -> None:
    for _ in range(500):
        if page.started:
            webbrowser.open(page.url)
            return
        time.sleep(0.02)
