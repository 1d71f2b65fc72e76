"""The process around a node: logging, the socket, the port file, and the cases of exit code 1."""

from __future__ import annotations

import asyncio
import contextlib
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
import uvicorn
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from topics_server.node.boot import Boot
from topics_server.node.ground import Ground
from topics_server.runtime.metrics import log
from topics_server.server import (
    HttpServer,
    bind,
    raise_open_files,
    run,
    write_port_file,
)
from topics_server.settings import Settings
from topics_server.values.limits import SEND_BUFFER_BYTES


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
    """A port of this machine on which a process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def settings_of(tmp_path: Path, **changes: object) -> Settings:
    fields: dict[str, object] = {"data_dir": tmp_path / "data", "port": 0, **changes}
    return Settings(**fields)  # type: ignore[arg-type]


# -- socket and port --------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="others size their buffers differently")
def test_the_kernel_takes_little_of_what_a_connection_does_not_read(tmp_path: Path) -> None:
    with (
        bind(settings_of(tmp_path)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as served,
    ):
        held = served.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert held == 2 * SEND_BUFFER_BYTES


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
    # If the server ends before it handles signals, ours must not end the tests.
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


def test_a_stop_without_file_descriptors_ends_with_code_0_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loop must not run again after its main task: that would open a pair of sockets."""

    def exhaust(port: int) -> None:
        wait_until_ready(port)
        # Open descriptors stay open and no further one can be opened: the limit is 3, and 0 to 2
        # are in use.
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )

    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = settings_of(tmp_path, port_file=tmp_path / "port")
    assert run_with(settings, exhaust) == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    assert lines_of(capsys)[-1].endswith("stopped")


def test_a_signal_during_recovery_ends_with_code_0_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(boot: Boot) -> None:
        await asyncio.sleep(3_600)

    def visit(port: int) -> None:
        assert get(port, "/v0/health").status_code == 200
        answer = get(port, "/v0/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")

    monkeypatch.setattr(Boot, "start", start)
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


# -- streams and WebSockets -------------------------------------------------------------------


def watched(port: int, count: int = 1) -> list[str]:
    """The paths of new sessions over a topic with one record."""
    url = f"http://127.0.0.1:{port}/v0"
    with httpx.Client(trust_env=False, timeout=10) as client:
        assert client.post(f"{url}/topics/jobs", json={"records": [{"data": 1}]}).is_success
        answers = [client.post(f"{url}/watch", json={"topics": {"jobs": {}}}) for _ in range(count)]
    return [str(answer.json()["stream_url"]) for answer in answers]


def ask(port: int, path: str) -> socket.socket:
    """Send a GET without reading the answer."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    sock.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\naccept: */*\r\n\r\n".encode())
    return sock


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    """The received bytes up to a mark."""
    received = b""
    while mark not in received:
        piece = sock.recv(65_536)
        assert piece, received
        received += piece
    return received


def read_all(sock: socket.socket) -> bytes:
    """The received bytes up to the end of the connection."""
    received = b""
    while piece := sock.recv(65_536):
        received += piece
    sock.close()
    return received


def open_socket(port: int) -> contextlib.AbstractContextManager[ClientConnection]:
    return connect(f"ws://127.0.0.1:{port}/v0/ws", proxy=None, open_timeout=10)


def test_a_stop_ends_streams_and_sockets_at_once(tmp_path: Path) -> None:
    streams: list[socket.socket] = []
    sockets: list[ClientConnection] = []
    signalled = 0.0

    def visit(port: int) -> None:
        nonlocal signalled
        wait_until_ready(port)
        for path in watched(port, 100):
            streams.append(ask(port, path))
            read_until(streams[-1], b"caught-up")
        sockets.extend(stack.enter_context(open_socket(port)) for _ in range(10))
        signalled = time.monotonic()

    with contextlib.ExitStack() as stack:
        assert run_with(settings_of(tmp_path, port_file=tmp_path / "port"), visit) == 0
        # Waiting for them would take the whole of shutdown_grace_ms, ten seconds.
        assert time.monotonic() - signalled < 5
        assert {read_all(stream)[-5:] for stream in streams} == {b"0\r\n\r\n"}
        for peer in sockets:
            with pytest.raises(ConnectionClosed) as caught:
                peer.recv(timeout=10)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1001


def test_a_stream_waits_for_recovery_and_is_answered_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path, port_file=tmp_path / "port")
    paths: list[str] = []

    def visit(port: int) -> None:
        wait_until_ready(port)
        paths.extend(watched(port))

    assert run_with(settings, visit) == 0
    may_start = threading.Event()
    start = Boot.start

    async def start_late(boot: Boot) -> None:
        await asyncio.to_thread(may_start.wait, 10)
        await start(boot)

    def come_back(port: int) -> None:
        stream = ask(port, paths[0])
        assert get(port, "/v0/ready").status_code == 503
        assert get(port, "/v0/topics/jobs").status_code == 503
        may_start.set()
        received = read_until(stream, b"caught-up")
        assert received.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"$seq":1' in received
        stream.close()

    monkeypatch.setattr(Boot, "start", start_late)
    (tmp_path / "port").unlink()
    assert run_with(settings, come_back) == 0


def test_a_stop_during_recovery_hangs_up_on_a_stream_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A browser that gets 503 would never reconnect."""
    waiting: list[socket.socket] = []

    async def start(boot: Boot) -> None:
        await asyncio.sleep(3_600)

    def visit(port: int) -> None:
        waiting.append(ask(port, "/v0/watch/wid_x"))
        # This answer came after the stream's request, so the server had read that request.
        assert get(port, "/v0/ready").status_code == 503

    monkeypatch.setattr(Boot, "start", start)
    assert run_with(settings_of(tmp_path, port_file=tmp_path / "port"), visit) == 0
    assert read_all(waiting[0]) == b""
    assert [line.split()[2:] for line in lines_of(capsys)] == [["INFO", "stopped"]]


def test_sockets_are_not_packed_and_their_messages_bounded(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, port_file=tmp_path / "port", max_ws_message_bytes=1_000)

    def visit(port: int) -> None:
        wait_until_ready(port)
        with open_socket(port) as peer:
            assert peer.protocol.extensions == []
            peer.send('{"op":"ping","request_id":"%s"}' % ("x" * 200))
            assert json.loads(peer.recv(timeout=10))["op"] == "pong"
            peer.send("x" * 1_001)
            with pytest.raises(ConnectionClosed) as caught:
                peer.recv(timeout=10)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1009

    assert run_with(settings, visit) == 0


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
    assert line.endswith("; --port takes another one")
    Boot(Ground.open(settings, 64)).abandon()


def test_a_directory_in_use_ends_with_one_line_that_names_the_holder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(tmp_path)
    holder = Boot(Ground.open(settings, 64))
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


# -- the loop of the HTTP server -----------------------------------------------------------------


class Ticking(HttpServer):
    """Notes when uvicorn looked."""

    def __init__(self) -> None:
        super().__init__(uvicorn.Config(lambda scope: None, log_config=None))
        self.looked_at: list[float] = []

    async def on_tick(self, counter: int) -> bool:
        self.looked_at.append(time.monotonic())
        return await super().on_tick(counter)


def test_an_idle_server_sets_its_date_once_a_second_and_stops_at_once() -> None:
    async def watched() -> tuple[int, list[bytes], float, float]:
        server, dates = Ticking(), list[bytes]()
        began = time.monotonic()
        looping = asyncio.create_task(server.main_loop())
        while time.monotonic() < began + 2.5:
            await asyncio.sleep(0.05)
            dates += [value for _, value in server.server_state.default_headers[:1]]
        looks, stopped = len(server.looked_at), time.monotonic()
        server.stop()
        await looping
        return looks, dates, stopped - began, time.monotonic() - stopped

    looks, dates, watched_s, took_s = asyncio.run(watched())
    assert 2 <= looks <= watched_s + 1  # uvicorn's own loop has ten times as many
    assert len(set(dates)) >= 2
    assert took_s >= 0.1, "publishes that are under way are answered meanwhile"
    assert took_s < 1.0, "it does not wait for the end of the second"


def test_a_server_that_is_stopped_before_its_loop_has_a_date_and_does_not_wait() -> None:
    async def stopped() -> int:
        server = Ticking()
        server.stop()
        await asyncio.wait_for(server.main_loop(), 5)
        assert server.server_state.default_headers
        return len(server.looked_at)

    assert asyncio.run(stopped()) == 1
