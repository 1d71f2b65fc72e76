"""The process around a node: logging, the socket, the port file, and what ends with exit code 1."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from topics_server.metrics import log
from topics_server.node import Node
from topics_server.server import (
    JsonLines,
    bind,
    raise_open_files,
    run,
    set_up_logging,
    write_port_file,
)
from topics_server.settings import Settings


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    handlers, level, ours = logging.root.handlers[:], logging.root.level, log.level
    thresholds, files = gc.get_threshold(), resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.enable()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    log.setLevel(ours)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def settings_of(tmp_path: Path, **changes: object) -> Settings:
    fields: dict[str, object] = {"data_dir": tmp_path / "data", "port": 0, **changes}
    return Settings(**fields)  # type: ignore[arg-type]


# -- logging --------------------------------------------------------------------------------


def test_a_json_line_is_one_object_with_time_level_and_event() -> None:
    record = logging.LogRecord("n", logging.WARNING, "p", 1, 'a "b"\n%d', (7,), None)
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "ts": int(record.created * 1000),
        "level": "warning",
        "event": 'a "b"\n7',
    }


def test_a_json_line_of_a_defect_has_its_traceback() -> None:
    try:
        raise ArithmeticError("a defect")
    except ArithmeticError:
        record = logging.LogRecord("n", logging.ERROR, "p", 1, "x", None, sys.exc_info())
    line = JsonLines().format(record)
    assert "\n" not in line
    assert "ArithmeticError: a defect" in json.loads(line)["traceback"]


def test_the_level_is_ours_and_libraries_speak_from_warnings_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(settings_of(tmp_path, log_level="debug", log_format="json"))
    log.debug("ours")
    logging.getLogger("uvicorn.error").info("theirs")
    logging.getLogger("uvicorn.error").warning("theirs, a warning")
    out, err = capsys.readouterr()
    assert [json.loads(line)["event"] for line in err.splitlines()] == [
        "ours",
        "theirs, a warning",
    ]
    assert out == "", "standard output is for results"


def test_text_lines_say_level_and_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(settings_of(tmp_path, log_level="warning"))
    log.info("not shown")
    log.warning("shown %d", 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING shown 1")


# -- socket and port --------------------------------------------------------------------------


def test_port_0_is_any_free_port_and_only_loopback_hears(tmp_path: Path) -> None:
    with bind(settings_of(tmp_path)) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        assert port > 0
        with socket.create_connection((host, port), timeout=5):
            pass


def test_a_port_in_use_is_an_error_and_leaves_no_socket(tmp_path: Path, taken: int) -> None:
    with pytest.raises(OSError) as failure:
        bind(settings_of(tmp_path, port=taken))
    assert failure.value.errno == errno.EADDRINUSE


def test_a_port_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "port"
    path.write_text("an older one")
    write_port_file(path, 4321)
    assert path.read_text() == "4321\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["port"]


def test_open_files_are_raised_to_what_is_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert raise_open_files() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- a whole life -----------------------------------------------------------------------------


def run_with(settings: Settings, meanwhile: Callable[[int], None]) -> int:
    """Run a server in this thread; another calls `meanwhile` with the port, then sends SIGTERM."""
    path = settings.port_file
    assert path is not None
    problems: list[BaseException] = []

    def visit() -> None:
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            meanwhile(int(path.read_text()))
        except BaseException as problem:
            problems.append(problem)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    visitor = threading.Thread(target=visit)
    # Should the server end before it takes signals, ours must not end the tests.
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        visitor.start()
        code = run(settings)
        visitor.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert problems == []
    return code


def get(port: int, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=10)


def wait_until_ready(port: int) -> None:
    for _ in range(2_000):
        if get(port, "/v0/ready").status_code == 200:
            return
        time.sleep(0.005)
    raise AssertionError("not ready")


def test_a_server_serves_until_sigterm_and_ends_with_code_0_and_a_clean_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(tmp_path, port_file=tmp_path / "port", log_format="json")
    assert run_with(settings, wait_until_ready) == 0
    events = [json.loads(line)["event"] for line in lines_of(capsys)]
    assert events[0].startswith("ready on http://127.0.0.1:")
    assert json.loads((tmp_path / "data" / "FORMAT").read_text())["clean_stop"] is True


def test_a_signal_during_recovery_ends_with_code_0_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(node: Node) -> None:
        await asyncio.sleep(3_600)

    def visit(port: int) -> None:
        assert get(port, "/v0/health").status_code == 200
        answer = get(port, "/v0/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")

    monkeypatch.setattr(Node, "start", start)
    assert run_with(settings_of(tmp_path, port_file=tmp_path / "port"), visit) == 0
    assert list((tmp_path / "data" / "snapshots").iterdir()) == []


def test_data_that_cannot_be_served_end_with_code_1_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(tmp_path, port_file=tmp_path / "port")
    assert run_with(settings, wait_until_ready) == 0
    for path in (tmp_path / "data" / "wal").glob("*.wal"):
        path.unlink()
    capsys.readouterr()
    assert run(settings) == 1
    assert any("cannot start: " in line and "missing" in line for line in lines_of(capsys))


# -- exit code 1 ------------------------------------------------------------------------------


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_port_in_use_ends_with_one_line_and_frees_the_directory(
    tmp_path: Path, taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(tmp_path, port=taken)
    assert run(settings) == 1
    (line,) = lines_of(capsys)
    assert f"cannot listen on 127.0.0.1 port {taken}: Address already in use" in line
    Node.open(settings, 64).abandon()


def test_a_directory_in_use_ends_with_one_line_that_names_the_holder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(tmp_path)
    holder = Node.open(settings, 64)
    try:
        assert run(settings) == 1
    finally:
        holder.abandon()
    (line,) = lines_of(capsys)
    assert "cannot start: " in line
    assert "pid" in line


def test_a_foreign_directory_ends_with_one_line_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("x")
    assert run(settings_of(tmp_path)) == 1
    (line,) = lines_of(capsys)
    assert "thesis.txt" in line
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["thesis.txt"]


def test_a_newer_format_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "FORMAT").write_text('{"format": 99}')
    assert run(settings_of(tmp_path)) == 1
    (line,) = lines_of(capsys)
    assert "format 99" in line
