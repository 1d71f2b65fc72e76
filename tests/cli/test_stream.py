"""`topics stream` and `topics append --producer` as processes against real servers."""

from __future__ import annotations

import contextlib
import functools
import http.server
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import MakeServer, Topics
from tests.contract.driver import eventually
from tests.ports import lasting_port

WITHIN_S = 60.0
BYTES = ["-t", "application/octet-stream"]


class Follower:
    """`topics stream follow`: its output and its exit code."""

    def __init__(self, topics: Topics, *words: str) -> None:
        self.out = b""
        self._errors = topics.directory / f"errors-{random.random()}"
        with self._errors.open("wb") as errors:
            self.process = topics.spawn("stream", "follow", *words, stderr=errors, bufsize=0)
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            while piece := stream.read(65536):
                self.out += piece

    @property
    def err(self) -> str:
        return self._errors.read_text()

    def wait_for(self, out: bytes) -> None:
        eventually(lambda: self.out == out, f"{out!r}, not {self.out!r}; {self.err}", WITHIN_S)

    def end(self) -> int:
        code = self.process.wait(WITHIN_S)
        self._thread.join(WITHIN_S)
        return code


Follow = Callable[..., Follower]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Start following; a process that still runs at the end is killed."""
    followers: list[Follower] = []

    def start(topics: Topics, *words: str) -> Follower:
        followers.append(Follower(topics, *words))
        return followers[-1]

    yield start
    for follower in followers:
        if follower.process.poll() is None:
            follower.process.kill()
        follower.end()


# -- a stream's life -------------------------------------------------------------------------------


def test_messages_are_printed_one_a_line_by_the_byte(topics: Topics, topic: str) -> None:
    assert topics.good("stream", "create", topic).value["created"] is True
    assert topics.good("stream", "create", topic).value["created"] is False
    topics.good("stream", "append", topic, '{"a":1e400}', " [1, 2] ", '"\\u00e9"')
    topics.good("stream", "append", topic, stdin=b'{"b": 1}\n\n{"c":2}')
    expected = b'{"a":1e400}\n[1, 2]\n"\\u00e9"\n{"b": 1}\n{"c":2}\n'
    assert topics.good("stream", "read", topic).out == expected
    whole = topics.good("stream", "read", f"{topics.url}/v1/stream/{topic}", "--offset")
    assert whole.out == expected
    offset = whole.message.removeprefix("next offset: ")
    topics.good("stream", "append", topic, "6")
    assert topics.good("stream", "read", topic, "--from", offset).out == b"6\n"


def test_bytes_go_in_and_come_out_as_they_are(topics: Topics, topic: str) -> None:
    data = random.Random(1).randbytes(700_000)
    topics.good("stream", "create", topic, *BYTES)
    topics.good("stream", "append", topic, stdin=data)
    topics.good("stream", "append", topic, "--producer", "p", stdin=data)
    topics.good("stream", "append", topic, "a", "b", "--close")
    expected = data + data + b"ab"
    assert topics.good("stream", "read", topic).out == expected
    for live in ("sse", "long-poll"):
        assert topics.good("stream", "follow", topic, "--live", live).out == expected


def test_a_closed_stream_takes_nothing_more(topics: Topics, topic: str) -> None:
    topics.good("stream", "create", topic)
    topics.good("stream", "close", topic)
    topics.good("stream", "close", topic)
    for more in ([], ["--producer", "p"]):
        ran = topics("stream", "append", topic, "1", *more)
        assert ran.code == 1
        assert "the stream is closed" in ran.message
    topics.good("stream", "rm", topic, "--yes")
    assert topics("stream", "read", topic).code == 1
    assert topics("stream", "rm", topic, "--yes").code == 1


def test_forks_and_expiry(topics: Topics, topic: str) -> None:
    topics.good("stream", "create", topic, *BYTES, "--ttl", "1000")
    assert topics("stream", "create", topic, *BYTES, "--ttl", "60").code == 1
    topics.good("stream", "append", topic, "ab")
    end = topics.good("stream", "read", topic, "--offset").message.removeprefix("next offset: ")
    topics.good("stream", "append", topic, "cd")
    topics.good("stream", "create", f"{topic}/all", "--fork", topic)
    topics.good("stream", "create", f"{topic}/some", "--fork", topic, "--fork-offset", end)
    topics.good("stream", "append", f"{topic}/some", "x")
    assert topics.good("stream", "read", f"{topic}/all").out == b"abcd"
    assert topics.good("stream", "read", f"{topic}/some").out == b"abx"
    topics.good(
        "stream", "create", f"{topic}/e", "--expires-at", "2999-01-01T00:00:00Z", "--closed"
    )
    assert topics.good("stream", "follow", f"{topic}/e").out == b""


@pytest.mark.parametrize(
    "words",
    [
        ["create", "s", "--ttl", "1", "--expires-at", "2999-01-01T00:00:00Z"],
        ["create", "s", "--fork-offset", "1"],
        ["append", "s", "1", "--epoch", "1"],
        ["read", "/"],
        ["read", "ftp://h/x"],
    ],
)
def test_wrong_usage(alone: Topics, words: list[str]) -> None:
    assert alone("stream", *words).code == 2


def test_an_invalid_message_is_wrong_usage(topics: Topics, topic: str) -> None:
    topics.good("stream", "create", topic)
    assert topics("stream", "append", topic, "1", "x").code == 2
    assert topics("stream", "append", topic, stdin=b"1\nx\n").code == 2


def test_no_server(alone: Topics) -> None:
    for words in (["read", "s"], ["follow", "s"], ["append", "s", "1"], ["rm", "s", "--yes"]):
        ran = alone("stream", *words)
        assert (ran.code, len(ran.err.splitlines())) == (2, 1)


# -- following -------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", ["auto", "sse", "long-poll"])
def test_follow_goes_on_until_the_stream_is_closed(
    topics: Topics, topic: str, follow: Follow, live: str
) -> None:
    topics.good("stream", "create", topic)
    topics.good("stream", "append", topic, "1", "2")
    follower = follow(topics, topic, "--live", live)
    follower.wait_for(b"1\n2\n")
    topics.good("stream", "append", topic, '{"n":3}')
    follower.wait_for(b'1\n2\n{"n":3}\n')
    topics.good("stream", "append", topic, "4", "--close")
    assert follower.end() == 0
    assert follower.out == b'1\n2\n{"n":3}\n4\n'
    assert follower.err == ""


def test_follow_from_now_leaves_out_what_is_there(
    topics: Topics, topic: str, follow: Follow
) -> None:
    topics.good("stream", "create", topic)
    topics.good("stream", "append", topic, '"old"')
    follower = follow(topics, topic, "--from", "now")

    def is_live() -> bool:
        if not follower.out:
            topics.good("stream", "append", topic, '"ping"')
        return bool(follower.out)

    eventually(is_live, "it follows", WITHIN_S)
    topics.good("stream", "close", topic)
    assert follower.end() == 0
    assert set(follower.out.splitlines()) == {b'"ping"'}


def test_ctrl_c_is_an_end_like_any_other(topics: Topics, topic: str, follow: Follow) -> None:
    topics.good("stream", "create", topic)
    topics.good("stream", "append", topic, "1")
    follower = follow(topics, topic)
    follower.wait_for(b"1\n")
    follower.process.send_signal(signal.SIGINT)
    assert follower.end() == 0
    assert follower.err == ""


def test_it_ends_with_its_reader(topics: Topics, topic: str) -> None:
    topics.good("stream", "create", topic)
    topics.good("stream", "append", topic, "1", "2")
    process = topics.spawn("stream", "follow", topic, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    process.stdout.close()
    assert process.wait(WITHIN_S) == 0
    assert process.stderr is not None
    with process.stderr as errors:
        assert errors.read() == b""


@pytest.mark.parametrize("live", ["sse", "long-poll"])
@pytest.mark.parametrize("kind", [[], BYTES])
def test_follow_outlives_a_server_that_is_killed(
    own: MakeServer, tmp_path: Path, follow: Follow, live: str, kind: list[str]
) -> None:
    server = own({"TOPICS_PORT": str(lasting_port())})
    server.start()
    topics = Topics(server.api.url, tmp_path)
    topics.good("stream", "create", "s", *kind)
    follower = follow(topics, "s", "--live", live)
    expected = b""
    for round_ in range(3):
        words = [f"{round_ + 1}{number}" for number in range(5)]
        topics.good("stream", "append", "s", *words)
        expected += b"".join(word.encode() + (b"" if kind else b"\n") for word in words)
        if round_ == 0:
            follower.wait_for(expected)  # live
        if round_ < 2:
            server.crash()
    topics.good("stream", "close", "s")
    assert follower.end() == 0
    assert follower.out == expected


# -- append --producer -----------------------------------------------------------------------------


def test_each_producer_append_claims_an_epoch_or_goes_on_in_one(topics: Topics, topic: str) -> None:
    def place(*words: str) -> tuple[int, int]:
        value = topics.good("append", topic, "1", "--producer", "Zoë", *words).value
        return value["producer_epoch"], value["producer_seq"]

    assert [place(), place(), place()] == [(0, 0), (1, 0), (2, 0)]
    assert place("--epoch", "2") == (2, 1)
    assert place("--epoch", "2") == (2, 2)
    assert place("--epoch", "7") == (7, 0)
    assert place("--epoch", "7", "--seq", "1") == (7, 1)
    assert len(topics.good("read", topic).lines) == 7
    ran = topics("append", topic, "1", "--producer", "Zoë", "--epoch", "3")
    assert (ran.code, "producer_fenced" in ran.message) == (1, True)
    again = topics.good("append", topic, "1", "--producer", "Zoë", "--epoch", "7", "--seq", "1")
    assert again.value["repeated"] is True
    ran = topics("append", topic, "1", "--producer", "Zoë", "--epoch", "7", "--seq", "5")
    assert (ran.code, "producer_seq_conflict" in ran.message) == (1, True)
    assert len(topics.good("read", topic).lines) == 7


def test_a_producer_append_outlives_a_lost_answer(topics: Topics, topic: str) -> None:
    with _lossy(topics.url) as url:
        lossy = Topics(url, topics.directory)
        ran = lossy.good("append", topic, '"once"', "--producer", "p")
    assert ran.value == {"repeated": True, "producer_epoch": 0, "producer_seq": 0}
    assert [line["data"] for line in topics.good("read", topic).lines] == ["once"]


@pytest.mark.parametrize(
    "words", [["--epoch", "1"], ["--seq", "1"], ["--producer", "p", "--seq", "1"]]
)
def test_wrong_usage_of_producers(alone: Topics, words: list[str]) -> None:
    assert alone("append", "t", "1", *words).code == 2


class _Relay(http.server.BaseHTTPRequestHandler):
    """Passes requests on to a server, and drops the answer to the second request."""

    asked = 0
    there = ""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = httpx.post(self.there + self.path, content=body, headers=self.headers.items())
        type(self).asked += 1
        if self.asked == 2:
            return
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name.startswith("producer"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)


@contextlib.contextmanager
def _lossy(url: str) -> Iterator[str]:
    """The URL of a server behind such a relay."""
    handler = type("Handler", (_Relay,), {"there": url})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as relay:
        serve = functools.partial(relay.serve_forever, poll_interval=0.01)
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{relay.server_port}"
        relay.shutdown()
        thread.join()
