"""Published truths: a round trip, a download, LDS and paired differences, and refused input."""

from __future__ import annotations

import functools
import http.server
import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from support.files import edit_json, flip

import whence
from whence.cli.app import run
from whence.errors import DamagedFile, MissingFile
from whence.evaluate import Benchmark, Published, Truth, lds, score_against

M, R, Q, N = 40, 3, 4, 30
MEASURED: Any = {"measurement": "measurement", "unit": "", "higher_is_better": True}


def known() -> tuple[Benchmark, np.ndarray]:
    """Measurements that follow real effects, with noise; one good method and one of two runs."""
    random = np.random.default_rng(0)
    effects = random.normal(size=(Q, N))
    masks = random.random((M, N)) < 0.5
    measured = (masks @ effects.T)[:, None] + 0.3 * random.normal(size=(M, R, Q))
    truth = Truth(masks, measured, alpha=0.5, query="q", recipe="r")
    good = effects + 0.5 * random.normal(size=(Q, N))
    bad = [effects + 3 * random.normal(size=(Q, N)) for _ in range(2)]
    published = {
        "good": Published((good @ masks.T)[None], "Good()", 2.0),
        "bad": Published(np.stack([one @ masks.T for one in bad]), "Bad()"),
    }
    return Benchmark("known", truth, published, {"title": "Known", "how": "by hand"}), effects


def scores_of(values: np.ndarray, **provenance: Any) -> whence.Scores:
    about = {"query": "q", "recipe": "r"} | provenance
    return whence.Scores(values, method="Mine()", provenance=about, **MEASURED)


def test_lds_and_paired_differences() -> None:
    benchmark, effects = known()
    standing = benchmark.score(scores_of(effects))
    assert standing.result.value == lds(effects, benchmark.truth).value
    for name, one in benchmark.published.items():
        each = [
            spearmanr(run[q], benchmark.truth.means[:, q])[0]
            for run in one.predictions
            for q in range(Q)
        ]
        assert standing.published[name].value == pytest.approx(np.mean(each))
        difference = standing.differences[name]
        assert difference.value == pytest.approx(standing.result.value - np.mean(each))
    assert standing.differences["bad"].interval[0] > 0
    (good,) = benchmark.published["good"].predictions
    same = Benchmark("same", benchmark.truth, {"good": Published(good[None])})
    alike = np.linalg.lstsq(benchmark.truth.masks.astype(float), good.T, rcond=None)[0].T
    assert np.abs(same.score(alike).differences["good"].interval).max() < 1e-9  # paired
    text = repr(standing)
    lines = [line for line in text.splitlines() if "[" in line and "%" not in line]
    assert [line.split()[0] for line in lines] == ["→", "good", "bad"]
    assert f"ceiling {standing.result.ceiling:.3f}" in text and "2.0" in text


def test_round_trip(tmp_path: Path) -> None:
    benchmark, effects = known()
    benchmark.save(tmp_path / "b")
    again = Benchmark.open(tmp_path / "b")
    assert again.name == "known" and again.about == benchmark.about
    one, two = (b.score(effects) for b in (benchmark, again))
    assert one.result.value == two.result.value
    np.testing.assert_allclose(two.published["bad"].value, one.published["bad"].value, atol=1e-3)
    assert lds(effects, Truth.load(tmp_path / "b" / "truth")).value == one.result.value


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    known()[0].save(tmp_path / "web" / "b")
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            asked.append(self.path)

    handler = functools.partial(Handler, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as it:
        threading.Thread(target=it.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{it.server_port}/b", tmp_path / "web" / "b", asked
        it.shutdown()


def test_download(server: Any, tmp_path: Path, monkeypatch: Any) -> None:
    url, _, asked = server
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, effects = known()
    standing = score_against(url, effects)
    assert standing.result.value == known()[0].score(effects).result.value
    first = len(asked)
    assert score_against(f"{url}/benchmark.json", effects).name == "known"
    assert asked[first:] == ["/b/benchmark.json"]  # the rest is in the cache
    with pytest.raises(ValueError, match=r"limit=1,000"):
        Benchmark.download(url, tmp_path / "other", limit=1000)
    with pytest.raises(MissingFile, match="check the address"):
        Benchmark.download(url + "-not-there", tmp_path / "other")
    with pytest.raises(ValueError, match="must start with https"):
        Benchmark.download("file:///etc/passwd", tmp_path / "other")


def test_a_changed_download_is_refused(server: Any, tmp_path: Path) -> None:
    url, folder, _ = server
    flip(folder / "truth" / "measurements.npy", 200)
    with pytest.raises(ValueError, match="size or checksum"):
        Benchmark.download(url, tmp_path / "cache")


@pytest.mark.parametrize("name", ["../x.npy", "/etc/passwd", "a/../../b", "C:\\x", "a//b"])
def test_names_that_lead_out_of_the_folder(server: Any, tmp_path: Path, name: str) -> None:
    url, folder, _ = server
    content = json.loads((folder / "benchmark.json").read_text())
    edit_json(folder / "benchmark.json", files=content["files"] | {name: {"bytes": 1}})
    with pytest.raises(DamagedFile, match="is not the name of a file"):
        Benchmark.download(url, tmp_path / "cache")
    assert not list(tmp_path.rglob("x.npy"))


def test_bad_input(tmp_path: Path) -> None:
    benchmark, effects = known()
    with pytest.raises(ValueError, match="other queries than the truth"):
        benchmark.score(scores_of(effects[::-1], query="in another order"))
    with pytest.raises(ValueError, match="about candidates, which the run never trained on"):
        benchmark.score(scores_of(effects, candidates=True))
    about_data = Truth(benchmark.truth.masks, benchmark.truth.measurements, query="q", data="these")
    assert lds(scores_of(effects, train={"train": "these"}), about_data).value > 0.5
    with pytest.warns(UserWarning, match="other training data than the truth"):
        lds(scores_of(effects, train={"train": "others"}), about_data)
    about_data.save(tmp_path / "truth")
    assert Truth.load(tmp_path / "truth").data == "these"
    with pytest.raises(ValueError, match="about 29 training examples"):
        benchmark.score(scores_of(effects[:, 1:]))
    with pytest.raises(ValueError, match="of 3 queries"):
        benchmark.score(effects[1:])
    broken = effects.copy()
    broken[1, 2] = np.nan
    with pytest.raises(ValueError, match="first of query 1 and example 2"):
        benchmark.score(broken)
    with pytest.raises(ValueError, match="measurement='loss'"):
        benchmark.score(whence.Scores(effects, method="M", **MEASURED | {"measurement": "loss"}))
    with pytest.raises(ValueError, match=r"predictions of x have shape \(1, 4, 39\)"):
        Benchmark("b", benchmark.truth, {"x": Published(np.zeros((1, Q, M - 1)))})
    with pytest.raises(ValueError, match="not finite"):
        Benchmark("b", benchmark.truth, {"x": Published(np.full((1, Q, M), np.nan))})
    with pytest.raises(MissingFile, match=r"no benchmark\.json"):
        Benchmark.open(tmp_path)


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    known()[0].save(tmp_path)
    flip(tmp_path / "predictions" / "0.npy", 200)
    with pytest.raises(DamagedFile, match="predictions"):
        Benchmark.open(tmp_path)


def test_scores_of_another_model_are_refused() -> None:
    benchmark, effects = known()
    truth = Truth(
        benchmark.truth.masks,
        benchmark.truth.measurements[:, :1],
        seeds=[7],
        in_place=True,
        recipe="r",
        query="q",
    )
    single = Benchmark("single", truth)
    assert single.score(scores_of(effects, seed=7)).result.ceiling == 1
    with pytest.raises(ValueError, match="single model of seed 7"):
        single.score(scores_of(effects, seed=8))


def test_command(tmp_path: Path, capsys: Any) -> None:
    benchmark, effects = known()
    benchmark.save(tmp_path / "b")
    scores_of(effects).save(tmp_path / "mine")
    scores_of(-effects).save(tmp_path / "worse")
    places = [str(tmp_path / name) for name in ("b", "mine", "worse")]
    assert run(["score-against", *places[:2]]) == 0
    shown = capsys.readouterr().out
    assert "→ Mine()" in shown and "good" in shown and "ceiling" in shown
    assert run(["score-against", *places, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"mine", "worse"} and data["worse"]["lds"] < 0
    assert data["mine"]["differences"]["bad"]["interval"][0] > 0
    assert run(["score-against", str(tmp_path / "mine"), places[1]]) != 0
    assert "benchmark.json" in capsys.readouterr().err


def test_sizes_that_cancel_do_not_pass_the_limit(server: Any, tmp_path: Path) -> None:
    url, folder, asked = server
    sizes = {"a": {"bytes": 10**12, "sha256": ""}, "b": {"bytes": -(10**12), "sha256": ""}}
    edit_json(folder / "benchmark.json", files=sizes)
    with pytest.raises(DamagedFile, match="bytes=-1000000000000"):
        Benchmark.download(url, tmp_path / "cache")
    many = {f"{k}.npy": {"bytes": 0, "sha256": ""} for k in range(1001)}
    edit_json(folder / "benchmark.json", files=many)
    with pytest.raises(DamagedFile, match="names 1,001 files"):
        Benchmark.download(url, tmp_path / "cache")
    assert asked == 2 * ["/b/benchmark.json"]


class Answering(http.server.BaseHTTPRequestHandler):
    """Sends these bytes, whatever it is asked."""

    sent: tuple[bytes, ...] = ()

    def do_GET(self) -> None:
        for piece in self.sent:
            self.wfile.write(piece)
            self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


HEAD = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [(b"\x1b[31mno status\r\n\r\n",), (HEAD, *[b" "] * 400), (b"HTTP/1.1 200 OK\r\n" * 999,)],
)
def test_servers_that_do_not_answer_as_they_should(
    sent: tuple[bytes, ...], tmp_path: Path, monkeypatch: Any
) -> None:
    handler = type("Handler", (Answering,), {"sent": sent})
    monkeypatch.setattr("whence.evaluate.benchmark.TIMEOUT", 0.0 if sent[0] == HEAD else 5.0)
    monkeypatch.setattr("whence.evaluate.benchmark.SLOWEST", 10**12)
    monkeypatch.setattr("urllib.request.urlopen", functools.partial(_opened, timeout_of_test=5.0))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as it:
        threading.Thread(target=it.serve_forever, daemon=True).start()
        with pytest.raises(MissingFile, match=r"sends too slowly|cannot be read") as raised:
            Benchmark.download(f"http://127.0.0.1:{it.server_port}", tmp_path)
        it.shutdown()
    assert "\x1b" not in str(raised.value)


_urlopen = urllib.request.urlopen


def _opened(url: str, timeout: float, timeout_of_test: float) -> Any:
    return _urlopen(url, timeout=timeout_of_test)


@pytest.mark.parametrize("url", ["http://[::1", "https://a b", "http://\x00/", "http://x\ny/"])
def test_addresses_that_are_none(url: str, tmp_path: Path) -> None:
    with pytest.raises(whence.WhenceError):
        Benchmark.download(url, tmp_path)


def test_a_benchmark_that_is_open_is_taken_as_it_is() -> None:
    benchmark, effects = known()
    expected = benchmark.score(effects).result.value
    assert score_against(benchmark, effects).result.value == expected
