"""The load generator: an answer that never ends is an error, by one connection and by several."""

from __future__ import annotations

import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from benchmarks.clients import load


@pytest.fixture
def dripping_port() -> int:
    """A server that sends the head of an answer a byte every 10 ms, for 5 s."""
    listener = socket.create_server(("127.0.0.1", 0))

    def drip(client: socket.socket) -> None:
        with client:
            client.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            for _ in range(500):
                time.sleep(0.01)
                try:
                    client.sendall(b"x")
                except OSError:
                    return

    def serve() -> None:
        with listener:
            for _ in range(2):
                client, _ = listener.accept()
                threading.Thread(target=drip, args=(client,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


@pytest.mark.parametrize("connections", [1, 2])
def test_an_answer_without_an_end_is_an_error(
    connections: int, dripping_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "STALL_NS", 200_000_000)
    path = tmp_path / "requests"
    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    path.write_bytes(struct.pack("<I", len(request)) + request)
    job = {"port": dripping_port, "seconds": 0.05, "connections": connections}
    run = load.alone if connections == 1 else load.closed_loop
    report = run(job, load.Requests(str(path)))
    assert report["count"] == 0
    assert report["errors"] == connections
    assert load.ENDLESS in report["first_error"]
