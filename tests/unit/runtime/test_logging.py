"""The log: one line an event, no secrets, and no thread that waits for its reader."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from topics_server.runtime.logging import (
    Access,
    AccessLog,
    JsonLines,
    LogOutput,
    TextLines,
    access_log,
    blotted,
    set_up,
    standard_error_writer,
)
from topics_server.runtime.metrics import log

WITHIN_S = 20.0


class Wanted(msgspec.Struct):
    log_level: str = "info"
    log_format: str = "text"
    access_log: str = "off"
    access_log_sample: int = 3


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    uvicorns = logging.getLogger("uvicorn.error")
    kept = logging.root.handlers[:], logging.root.level, log.level, uvicorns.filters[:]
    yield
    logging.root.handlers[:], uvicorns.filters[:] = kept[0], kept[3]
    logging.root.setLevel(kept[1])
    log.setLevel(kept[2])


def told_by(capsys: pytest.CaptureFixture[str], output: LogOutput) -> list[str]:
    output.close(WITHIN_S)
    out, err = capsys.readouterr()
    assert out == "", "standard output is for results"
    return err.splitlines()


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("Invalid UTF-8 sequence received from client.", False),
        ("ASGI callable returned without completing handshake.", False),
        ("Exception in ASGI application\n", True),
    ],
)
def test_client_errors_are_not_logged_as_errors(
    line: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    output = set_up(Wanted())
    logging.getLogger("uvicorn.error").error(line)
    assert any(line.strip() in told for told in told_by(capsys, output)) is is_told


def test_a_json_line_is_one_object_with_time_level_and_event() -> None:
    record = logging.LogRecord("n", logging.WARNING, "p", 1, 'a "b"\n%d', (7,), None)
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "ts": int(record.created * 1000),
        "level": "warning",
        "event": 'a "b"\n7',
    }


def defect() -> logging.LogRecord:
    try:
        raise ArithmeticError("a defect\nin two lines")
    except ArithmeticError:
        return logging.LogRecord("n", logging.ERROR, "p", 1, "x", None, sys.exc_info())


def test_a_json_line_of_a_defect_has_its_traceback() -> None:
    line = JsonLines().format(defect())
    assert "\n" not in line
    assert "ArithmeticError: a defect" in json.loads(line)["traceback"]


def test_a_text_line_of_a_defect_is_one_line_too() -> None:
    line = TextLines().format(defect())
    assert "\n" not in line
    assert "ERROR   x | Traceback" in line
    assert line.endswith("| ArithmeticError: a defect | in two lines")


def test_no_text_of_a_client_begins_a_line_of_its_own() -> None:
    sent = "a\r\n2026-01-01 00:00:00,000 ERROR forged\x1b[2J\u2028x"
    record = logging.LogRecord("n", logging.WARNING, "p", 1, "%s", (sent,), None)
    line = TextLines().format(record)
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    access = Access(0, "GET", sent, "other", 404, 1, 0.1, "")
    assert len(TextLines().access(access).splitlines()) == 1
    assert len(JsonLines().access(access).splitlines()) == 1


def test_the_level_is_ours_and_libraries_speak_from_warnings_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = set_up(Wanted(log_level="debug", log_format="json"))
    log.debug("ours")
    logging.getLogger("uvicorn.error").info("theirs")
    logging.getLogger("uvicorn.error").warning("theirs, a warning")
    lines = told_by(capsys, output)
    assert [json.loads(line)["event"] for line in lines] == ["ours", "theirs, a warning"]


def test_text_lines_say_level_and_event(capsys: pytest.CaptureFixture[str]) -> None:
    output = set_up(Wanted(log_level="warning"))
    log.info("not shown")
    log.warning("shown %d", 1)
    (line,) = told_by(capsys, output)
    assert line.endswith("WARNING shown 1")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET /v0/watch/wid_x?token=sEcret&a=1", "GET /v0/watch/wid_x?token=***&a=1"),
        ("GET /x?a=1&ticket=sEcret HTTP/1.1", "GET /x?a=1&ticket=*** HTTP/1.1"),
        ("Authorization: Bearer sEcret", "Authorization: Bearer ***"),
        ("authorization: bearer  sEcret.x-y_z=", "authorization: bearer  ***"),
        ("protocols: topics.bearer.c0VjcmV0, x", "protocols: topics.bearer.***, x"),
        ("token=sEcret", "token=***"),
        ("a token is missing", "a token is missing"),
    ],
)
@pytest.mark.parametrize("lines", [TextLines(), JsonLines()])
def test_text_that_looks_like_a_key_is_masked(
    text: str, shown: str, lines: TextLines | JsonLines
) -> None:
    assert blotted(text) == shown
    record = logging.LogRecord("n", logging.WARNING, "p", 1, "%s", (text,), None)
    assert "sEcret" not in lines.format(record)


def test_no_thread_waits_for_a_stuck_reader() -> None:
    """While the pipe is full, lines are dropped and counted; the log has the count once the pipe
    drains.
    """
    reading, writing = os.pipe()
    may_write = threading.Event()
    is_stuck = threading.Event()

    def write(text: bytes) -> None:
        is_stuck.set()
        assert may_write.wait(WITHIN_S)
        with os.fdopen(os.dup(writing), "wb", buffering=0) as file:
            file.write(text)

    output = LogOutput(TextLines(), write, most=5)
    output.put("first")
    assert is_stuck.wait(WITHIN_S)
    began = time.monotonic()
    for number in range(1000):
        output.put(f"line {number}")
    assert time.monotonic() - began < 5, "nobody waits"
    assert output.dropped == 995
    may_write.set()
    output.close(WITHIN_S)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        lines = file.read().decode().splitlines()
    assert lines[:6] == ["first", *(f"line {number}" for number in range(5))]
    assert lines[6].endswith("995 lines of the log were dropped: standard error was not read")


def test_the_end_does_not_wait_for_a_stuck_reader_either() -> None:
    may_write = threading.Event()

    def write(_: bytes) -> None:
        may_write.wait(WITHIN_S * 3)

    output = LogOutput(TextLines(), write)
    output.put("x")
    began = time.monotonic()
    output.close(0.05)
    assert time.monotonic() - began < WITHIN_S
    may_write.set()
    output.close(WITHIN_S)


def test_a_closed_reader_is_no_error() -> None:
    def write(_: bytes) -> None:
        raise BrokenPipeError

    output = LogOutput(TextLines(), write)
    output.put("x")
    output.put("y")
    output.close(WITHIN_S)
    assert output.dropped == 2


# -- the access log -------------------------------------------------------------------------


def note(access: AccessLog, status: int = 200, path: bytes = b"/v0/topics/jobs") -> None:
    access.note("POST", path, "/v0/topics/{topic}", status, 12, 1.25, b"req-1")


def requests_of(wanted: Wanted, statuses: list[int]) -> list[dict[str, Any]]:
    written: list[bytes] = []
    output = LogOutput(JsonLines(), written.append)
    access = access_log(wanted, output)
    assert access is not None
    for status in statuses:
        note(access, status)
    output.close(WITHIN_S)
    return [json.loads(line) for line in b"".join(written).splitlines()]


def test_it_is_off_by_default() -> None:
    output = LogOutput(TextLines(), lambda _: None)
    assert access_log(Wanted(), output) is None
    output.close(WITHIN_S)


def test_full_logs_every_request() -> None:
    told = requests_of(Wanted(access_log="full"), [200, 404, 201])
    assert [line["status"] for line in told] == [200, 404, 201]
    line = told[0]
    assert line.pop("ts") > 0
    assert line == {
        "level": "info",
        "event": "request",
        "method": "POST",
        "path": "/v0/topics/jobs",
        "route": "/v0/topics/{topic}",
        "status": 200,
        "bytes": 12,
        "ms": 1.25,
        "request_id": "req-1",
    }


def test_sampled_logs_one_in_so_many_and_every_server_failure() -> None:
    told = requests_of(Wanted(access_log="sampled"), [200, 201, 202, 200, 500, 503, 200, 200, 203])
    assert [line["status"] for line in told] == [202, 500, 503, 203]


def test_a_query_is_never_logged() -> None:
    written: list[bytes] = []
    output = LogOutput(TextLines(), written.append)
    note(AccessLog(output, 1), path=b"/v0/watch/wid_x?token=sEcret")
    note(AccessLog(output, 1), path=b"/v0/watch?ticket=sEcret")
    output.close(WITHIN_S)
    text = b"".join(written).decode()
    assert "sEcret" not in text
    assert "POST /v0/watch/wid_x 200 1.250 ms 12 bytes req-1" in text


def test_a_full_pipe_that_does_not_block_is_waited_for_without_spinning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Standard error may be non-blocking: the process that made the pipe decides that for all its
    users.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    taken = os.write(writing, b"x" * 2**20)
    with os.fdopen(writing, "w") as stream, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", stream)
        write = standard_error_writer()
        writer = threading.Thread(target=write, args=(b"a line\n",))
        writer.start()
        before = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
        writer.join(0.3)
        used_s = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) - before
        assert writer.is_alive()
        received = b""
        while len(received) < taken + len(b"a line\n"):
            received += os.read(reading, 2**20)
        writer.join(10)
    os.close(reading)
    assert received.endswith(b"xa line\n")
    # A writer that spins uses the whole 0.3 s; one that sleeps uses almost nothing.
    assert used_s < 0.1
