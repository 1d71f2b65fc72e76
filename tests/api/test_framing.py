"""Without a proxy: each row of `framing` against a real server, also byte by
byte.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

import pytest

from tests.api.framing import CASES, SMUGGLED, TOPIC, Case
from tests.contract.driver import Server
from topics_server.values.errors import Code

WITHIN_S: Final = 30.0
HONEST: Final = b"GET /v0/topics/honest HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("framing")
    made = Server(folder, {"TOPICS_MAX_BODY_BYTES": "65536", "TOPICS_ALLOWED_HOSTS": "h,other"})
    made.start()
    try:
        made.api.put(TOPIC)
        yield made
        made.stop()
    finally:
        if made.process is not None:
            made.process.kill()
            made.process.wait()


def answers_to(server: Server, *pieces: bytes) -> bytes:
    """All bytes that the server sends until it closes the connection."""
    parts = urlsplit(server.api.url)
    got = b""
    with socket.create_connection((parts.hostname, parts.port or 0), timeout=WITHIN_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for piece in pieces:
                sock.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server refused the request before it had all bytes
        for _ in range(10_000):
            try:
                piece = sock.recv(65536)
            except ConnectionResetError:
                break
            if not piece:
                break
            got += piece
    return got


def split(answers: bytes) -> list[tuple[int, bytes, bytes]]:
    """Split bytes into the status, head and body of each answer; each must be complete, with
    nothing between them.
    """
    found: list[tuple[int, bytes, bytes]] = []
    for _ in range(100):
        if not answers:
            break
        match = _STATUS.match(answers)
        assert match is not None, f"no answer: {answers[:200]!r}"
        head, end, rest = answers.partition(b"\r\n\r\n")
        assert end
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        size = 0 if length is None else int(length[1])
        assert len(rest) >= size, f"cut: {answers!r}"
        found.append((int(match[1]), head, rest[:size]))
        answers = rest[size:]
    return found


def check(case: Case, got: bytes, *, is_cut: bool = False) -> None:
    answers = split(got)
    stays = bool(answers) and b'"honest"' in answers[-1][2]
    if not (is_cut and case.may_end):
        assert stays == case.stays, answers
    if stays:
        assert answers.pop()[0] == 404
    assert tuple(status for status, _, _ in answers) == case.answers, got[:1000]
    for status, head, body in answers:
        if status >= 400:
            assert b"content-type: application/json" in head
            assert set(json.loads(body)) <= {"error", "performance"}
            Code(json.loads(body)["error"]["code"])


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bytes_are_read_in_one_way_or_refused(server: Server, case: Case) -> None:
    """§12: without a proxy, the next request gets its own answer, or the connection is closed."""
    check(case, answers_to(server, case.raw, HONEST))
    assert server.api.state(SMUGGLED).status_code == 404, "a hidden request was served"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_how_the_bytes_are_cut_changes_nothing(server: Server, case: Case) -> None:
    """§12: a request that is refused whole is also refused in pieces of one byte."""
    raw = case.raw
    step = 1 if len(raw) < 4000 else len(raw) // 64
    pieces = [raw[start : start + step] for start in range(0, len(raw), step)]
    check(case, answers_to(server, *pieces, HONEST), is_cut=True)
    assert server.api.state(SMUGGLED).status_code == 404, "a hidden request was served"


def test_a_refusal_stands_behind_the_answers_before_it(server: Server) -> None:
    body = b'{"from_seq":999999,"wait_ms":300}'
    wait = (
        b"POST /v0/topics/framing/diff HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    got = answers_to(server, wait + b"GET /v0/health HTTP/1.1\r\nHost: h\r\n\r\ngarbage\r\n\r\n")
    assert [status for status, _, _ in split(got)] == [200, 200, 400]
    assert b"next_from_seq" in split(got)[0][2]
