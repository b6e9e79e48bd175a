"""The web server: access control, and the address of each answer.

Whoever knows the token may read. Changes are POST requests with the token in a header, which no
other page can send. Requests to another host name than the one served (DNS rebinding), or from
another origin, are refused before anything else is checked.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

from fastapi import Body, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from pydantic import Field
from starlette.exceptions import HTTPException as AnyHTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from whence.errors import InvalidInput
from whence.explore.explorer import Explorer
from whence.explore.reading import Busy
from whence.table import escaped

TOKEN = "x-whence-token"  # the header
BODY_BYTES = 2**20  # bytes of a request
ARRIVAL_SECONDS = 20.0  # in which a request must arrive
STATIC = {
    "views.js": ("whence.present", "text/javascript"),
    "whence.css": ("whence.present", "text/css"),
    "explore.js": ("whence.explore", "text/javascript"),
    "map.js": ("whence.explore", "text/javascript"),
    "explore.css": ("whence.explore", "text/css"),
}
Text = Annotated[str, Field(max_length=1000)]
Count = Annotated[int, Field(ge=0, le=2**40)]
Places = Annotated[str, Field(max_length=60000)]  # "3,14,15"
# what a request may send for an argument of an answer
LIMITED: dict[Any, Any] = {str: Text, int: Count, int | None: Count | None, Sequence[int]: Places}
Send = Callable[[Any], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]


def static_file(package: str, name: str) -> str:
    return (files(package) / "static" / name).read_text("utf-8")


class Guard:
    """Accepts requests from this machine's browser with the token, and adds headers to answers.

    Args:
        app: the application to guard.
        token: the secret.
        hosts: names and ports of the server, such as "127.0.0.1:8765".
        cookie: the name of the cookie that holds the token.
        styled: whether examples contain HTML of the user's renderer, with style attributes.
        framed: whether pages of this machine may show the page in a frame.
    """

    def __init__(
        self,
        app: Any,
        token: str,
        hosts: frozenset[str],
        cookie: str,
        styled: bool = False,
        framed: bool = False,
    ) -> None:
        self.app, self.hosts, self.cookie = app, hosts, cookie
        self._token = token.encode()
        attributes = "; style-src-attr 'unsafe-inline'" if styled else ""
        ancestors = "http://localhost:* http://127.0.0.1:*" if framed else "'none'"
        policy = (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; "
            f"frame-ancestors {ancestors}{attributes}"
        )
        self.headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            **({} if framed else {"x-frame-options": "DENY"}),
            "referrer-policy": "no-referrer",  # the first address contains the token
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-store",
        }

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websockets here
            return

        async def answer(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                added = [(k.encode(), v.encode()) for k, v in self.headers.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        headers: dict[str, str] = {}
        for name, value in scope["headers"]:  # joined, a repeated one equals no expected value
            given = headers.get(name.decode("latin-1"))
            text = value.decode("latin-1")
            headers[name.decode("latin-1")] = text if given is None else f"{given}, {text}"
        status, why = self.refuse(scope["method"], scope["path"], scope["query_string"], headers)
        if status:
            body = f"{why}\n".encode()
            kind = [(b"content-type", b"text/plain; charset=utf-8")]
            await answer({"type": "http.response.start", "status": status, "headers": kind})
            await answer({"type": "http.response.body", "body": body})
            return
        await self.app(scope, _limited(receive), answer)

    def refuse(
        self, method: str, path: str, query: bytes, headers: Mapping[str, str]
    ) -> tuple[int, str]:
        """(status, why) if the request is refused; (0, "") otherwise."""
        if headers.get("host", "").lower() not in self.hosts:
            return 403, "403: open this page at the address that whence explore printed"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            return 403, "403: requests from other pages are refused"
        if method not in ("GET", "HEAD", "POST"):
            return 405, "405: only GET and POST"
        opened = path == "/" and method in ("GET", "HEAD")
        # A link on another page may open this page, but may not request anything else.
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not opened:
            return 403, "403: requests from other pages are refused"
        given = [headers.get(TOKEN, "")]
        if method != "POST":
            given.append(_cookie(headers.get("cookie", ""), self.cookie))
        if opened:
            given += parse_qs(query.decode("latin-1")).get("token", [])
        if not any(hmac.compare_digest(g.encode(), self._token) for g in given):
            return 403, (
                "403: the token is missing or wrong. Open the address that whence explore printed, "
                "with ?token=... at its end"
            )
        if method == "POST":
            if "transfer-encoding" in headers:
                return 411, "411: send the body in one piece, with a content-length"
            length = headers.get("content-length", "")
            if not length.isdecimal() or len(length) > 9 or int(length) > BODY_BYTES:
                return 413, f"413: send a content-length of at most {BODY_BYTES} bytes"
        return 0, ""


def _limited(receive: Receive) -> Receive:
    """`receive`, with limits on the size of a body and on the time until it has arrived."""
    size, complete = 0, False

    async def limited() -> Any:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), ARRIVAL_SECONDS)
        except TimeoutError:
            raise HTTPException(408, "the rest of the request did not arrive") from None
        size += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if size > BODY_BYTES:
            raise HTTPException(413, f"send at most {BODY_BYTES} bytes")
        return message

    return limited


class Json(JSONResponse):
    """JSON in UTF-8, with halves of surrogate pairs, which it cannot hold, replaced."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def _cookie(header: str, name: str) -> str:
    try:
        cookie = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if cookie is None else cookie.value


class Punctual(H11Protocol):
    """A connection that is closed unless a whole request head arrives in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        """Set the deadline while no request is being answered. More bytes do not move it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(ARRIVAL_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def create_app(
    explorer: Explorer, token: str, hosts: frozenset[str], framed: bool = False
) -> Guard:
    """The guarded web application.

    Args:
        explorer: computes the answers.
        token: the secret that gives access.
        hosts: names and ports of the server, such as "127.0.0.1:8765".
        framed: whether pages of this machine may show the page in a frame.
    """
    # cookies ignore ports: two explorers in one browser need two names
    ports = {host.rpartition(":")[2] for host in hosts}
    cookie = f"whence-token-{'-'.join(sorted(ports))}"
    app = FastAPI(
        title="whence", docs_url=None, redoc_url=None, openapi_url=None, default_response_class=Json
    )
    _pages(app, token, cookie)
    _reading(app, explorer)
    _retraining(app, explorer)
    _errors(app)
    return Guard(app, token, hosts, cookie, explorer.data.renders_html, framed)


def _pages(app: FastAPI, token: str, cookie: str) -> None:
    @app.get("/")
    def index() -> Response:
        page = static_file("whence.explore", "index.html").replace("{{token}}", token)
        answer = HTMLResponse(page)
        answer.set_cookie(cookie, token, httponly=True, samesite="strict", path="/")
        return answer

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in STATIC:
            return PlainTextResponse("there is no such file", 404)
        package, kind = STATIC[name]
        return Response(static_file(package, name), media_type=kind)


def _answer(function: Callable[..., Any]) -> Callable[..., Response]:
    """A route whose parameters are the function's arguments, within `LIMITED`.

    The function returns plain data, or a response. FastAPI would copy the data piece by piece
    before it is encoded, which takes longer than both.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    lists = [name for name, p in parameters.items() if p.annotation == Sequence[int]]

    def answer(**given: Any) -> Response:
        data = function(**given | {name: _places(given[name]) for name in lists})
        return data if isinstance(data, Response) else Json(data)

    answer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            p.replace(
                kind=p.KEYWORD_ONLY,
                annotation=LIMITED.get(p.annotation, p.annotation),
                default="" if name in lists else p.default,
            )
            for name, p in parameters.items()
        ]
    )
    return answer


def _reading(app: FastAPI, explorer: Explorer) -> None:
    data = explorer.data
    answers: dict[str, Callable[..., Any]] = {
        "overview": explorer.overview,
        "summary": explorer.summary,
        "map": explorer.map,
        "map/values": explorer.map_values,
        "queries": data.list_queries,
        "query": explorer.query,
        "examples": data.list_examples,
        "example": explorer.example,
        "rows": explorer.queries,
        "chosen": explorer.examples,
        "compare": explorer.compare,
        "compare/overall": explorer.overall,
        "audit": explorer.audit,
        "whatif": explorer.what_if,
    }
    for path, function in answers.items():
        app.get(f"/api/{path}", response_model=None)(_answer(function))

    @app.get("/api/card.svg")
    def card(scores: Text, row: Count) -> Response:
        headers = {"content-disposition": f'attachment; filename="query-{row}.svg"'}
        return Response(explorer.card(scores, row), 200, headers, "image/svg+xml")

    @app.get("/api/audit.csv")
    def audit_csv(
        scores: Text, text: Text = "", label: Text = "", stage: Text = ""
    ) -> StreamingResponse:
        lines = explorer.audit_csv(scores, text=text, label=label, stage=stage)
        name = quote(f"audit-{scores.replace('/', '-')}.csv")
        return StreamingResponse(
            lines,
            media_type="text/csv; charset=utf-8",
            headers={"content-disposition": f"attachment; filename*=UTF-8''{name}"},
        )


def _retraining(app: FastAPI, explorer: Explorer) -> None:
    get, post = (partial(add, response_model=None) for add in (app.get, app.post))
    get("/api/jobs")(_answer(explorer.list_jobs))
    get("/api/jobs/{name}")(_answer(explorer.job))
    post("/api/jobs/{name}/cancel")(_answer(explorer.cancel))
    post("/api/jobs/{name}/resume")(_answer(explorer.resume))
    post("/api/jobs/{name}/remove")(_answer(explorer.remove))

    @post("/api/jobs")
    def submit(places: Annotated[list[Count], Body()], seeds: Annotated[int, Body()]) -> Response:
        return Json(explorer.submit(places, seeds))


def _errors(app: FastAPI) -> None:
    """Send every error as one sentence for the page to show."""

    def with_status(status: int) -> Callable[[Request, Exception], JSONResponse]:
        return lambda _, error: Json({"error": str(error.args[0] if error.args else error)}, status)

    def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        parts = [f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()]
        return Json({"error": "; ".join(parts)}, 422)

    def broken(_: Request, error: Exception) -> JSONResponse:
        print(escaped("".join(traceback.format_exception(error))), file=sys.stderr)
        return Json({"error": f"{type(error).__name__}: {error}"}, 500)

    def refused(_: Request, error: Exception) -> JSONResponse:  # by FastAPI itself
        assert isinstance(error, AnyHTTPException)
        return Json({"error": error.detail}, error.status_code)

    app.add_exception_handler(AnyHTTPException, refused)
    app.add_exception_handler(Busy, with_status(503))
    app.add_exception_handler(ValueError, with_status(400))
    app.add_exception_handler(KeyError, with_status(404))
    app.add_exception_handler(PermissionError, with_status(409))
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, broken)


def _places(given: str) -> list[int]:
    """ "3,14,15" """
    parts = [part for part in given.split(",") if part]
    if not all(part.isdecimal() and len(part) < 16 for part in parts):
        raise InvalidInput("places must be numbers separated by commas")
    return [int(part) for part in parts]
