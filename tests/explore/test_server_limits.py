"""Requests that are too large, too slow, or not from the page."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from whence.explore import server, start
from whence.explore.launch import Running
from whence.scores import Scores


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(server, "ARRIVAL_SECONDS", 0.5)
    scores = Scores(
        np.ones((2, 3), np.float32),
        method="m\ud800",
        measurement="loss",
        unit="",
        higher_is_better=False,
    )
    with start({"a\udfff": scores}, check=False) as running:
        yield running


def ask(page: Running, request: bytes, *, wait: float = 2.0) -> bytes:
    """What the server answers until it closes the connection, or falls silent."""
    with socket.create_connection(("127.0.0.1", page.port), timeout=wait) as connection:
        connection.sendall(request)
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except (TimeoutError, ConnectionError):
            return answer
        return answer + b"<closed>"


def head(page: Running, method: str = "POST", path: str = "/api/jobs", **headers: str) -> bytes:
    lines = {"host": f"127.0.0.1:{page.port}", "x-whence-token": page.token, **headers}
    fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{fields}\r\n".encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.slow
def test_a_chunked_body_is_refused(page: Running) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for length in ({}, {"content_length": "10"}):
        request = head(page, transfer_encoding="chunked", **length)
        assert status(ask(page, request + chunk)) in (400, 411)


def test_a_long_body_is_refused_whatever_its_length_is_said_to_be(page: Running) -> None:
    request = head(page, content_length=str(2**21), content_type="application/json")
    assert status(ask(page, request)) == 413
    for length in ("-1", "1e3", "0x10", "99999999999999999999", "10, 20", "٣"):
        request = head(page, content_length="LENGTH").replace(b"LENGTH", length.encode())
        assert status(ask(page, request + b"{}")) in (400, 413)


def test_a_body_is_counted_as_it_arrives() -> None:
    """Whatever a header says."""
    import asyncio

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b" " * 2**19, "more_body": True}

    async def read() -> int:
        limited, count = server._limited(receive), 0
        with pytest.raises(server.HTTPException) as refused:
            while True:
                await limited()
                count += 1
        assert refused.value.status_code == 413
        return count

    assert asyncio.run(read()) == 2


@pytest.mark.parametrize("begun", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n"])
def test_half_a_request_is_not_waited_for(page: Running, begun: bytes) -> None:
    start = time.monotonic()
    answer = ask(page, begun)
    assert time.monotonic() - start < 4 and not answer.startswith(b"HTTP/1.1 2")


def test_bytes_that_trickle_in_do_not_keep_a_connection(page: Running) -> None:
    with socket.create_connection(("127.0.0.1", page.port), timeout=5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        start = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - start < 4:
                connection.sendall(b"x: y\r\n")
                time.sleep(0.05)


def test_half_a_body_is_not_waited_for(page: Running) -> None:
    request = head(page, content_length="100", connection="close") + b'{"places"'
    start = time.monotonic()
    assert status(ask(page, request)) == 408
    assert time.monotonic() - start < 4


def test_others_are_answered_meanwhile(page: Running) -> None:
    open_ones = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(50)]
    try:
        assert status(ask(page, head(page, "GET", "/api/overview", connection="close"))) == 200
    finally:
        for connection in open_ones:
            connection.close()


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2f..%2fserver.py",
        "/static/%2e%2e/%2e%2e/etc/passwd",
        "/static//etc/passwd",
        "/api/jobs/..%2f..%2frun",
        "/api/jobs/%00",
        "//evil.example/",
    ],
)
def test_no_path_leads_to_another_file(page: Running, path: str) -> None:
    answer = ask(page, head(page, "GET", path, connection="close"))
    assert status(answer) in (400, 404, 409) and b"root:" not in answer and b"import" not in answer


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"x_whence_token": ""},
        {"x_whence_token": "é"},
        {"x_whence_token": "", "cookie": "whence-token=x"},
    ],
)
def test_other_pages_and_hosts_are_refused(page: Running, headers: dict[str, str]) -> None:
    lines = {"host": f"127.0.0.1:{page.port}", "x_whence_token": page.token, "content_length": "2"}
    lines |= {"content_type": "application/json", "connection": "close", **headers}
    fields = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in lines.items())
    for method in ("GET /api/overview", "POST /api/jobs"):
        answer = ask(page, f"{method} HTTP/1.1\r\n{fields}\r\n{{}}".encode())
        assert status(answer) in (400, 403)


@pytest.mark.slow
def test_a_repeated_header_is_refused(page: Running) -> None:
    for header in ("origin: http://evil.example", f"origin: http://127.0.0.1:{page.port}"):
        request = head(page, "GET", "/api/overview", origin=f"http://127.0.0.1:{page.port}")
        assert (
            status(ask(page, request.replace(b"\r\n\r\n", f"\r\n{header}\r\n\r\n".encode()))) == 403
        )


def test_half_a_surrogate_pair_is_shown_as_a_question_mark(page: Running) -> None:
    answer = ask(page, head(page, "GET", "/api/overview", connection="close"))
    assert status(answer) == 200
    body = answer.split(b"\r\n\r\n", 1)[1].removesuffix(b"<closed>")
    assert "a?" in json.dumps(json.loads(body))
