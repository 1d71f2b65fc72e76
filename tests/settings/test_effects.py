"""Effects of settings that no other test shows; `rows` names each setting's test."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.contract.conftest import NewServer
from tests.contract.driver import Server, eventually, refused

LONG_MS = "86400000"


def names_in(server: Server, folder: str, pattern: str) -> list[str]:
    return sorted(path.name for path in (server.data_dir / folder).rglob(pattern))


def test_the_port_is_told_in_a_file(own: NewServer, tmp_path: Path) -> None:
    told = tmp_path / "elsewhere"
    server = own(TOPICS_PORT_FILE="")
    server.env = {"TOPICS_PORT_FILE": str(told)}
    process = server.process = server.spawn()
    eventually(told.exists, "the file is there", 30)
    port = int(told.read_text())
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    assert process.poll() is None


def test_each_shard_has_its_files(own: NewServer) -> None:
    server = own(TOPICS_WAL_SHARDS="3")
    server.start()
    assert {name[7:9] for name in names_in(server, "wal", "*.wal")} == {"00", "01", "02"}


def test_snapshots_come_after_time_or_bytes(own: NewServer, topic: str) -> None:
    never = {"TOPICS_CHECKPOINT_INTERVAL_MS": LONG_MS}
    idle = own(**never)
    by_bytes = own(**never, TOPICS_CHECKPOINT_WAL_BYTES="4096")
    by_time = own(TOPICS_CHECKPOINT_INTERVAL_MS="50")
    for server in (idle, by_bytes, by_time):
        server.start()
    before = {id(server): names_in(server, "snapshots", "*.snap") for server in (idle, by_bytes)}
    for server in (by_bytes, by_time, idle):

        def is_taken(server: Server = server) -> bool:
            server.api.add(topic, "x" * 5000)
            return names_in(server, "snapshots", "*.snap") != before.get(id(server), [])

        if server is not idle:
            eventually(is_taken, "a snapshot is taken", 30)
        else:
            is_taken()
    assert names_in(idle, "snapshots", "*.snap") == before[id(idle)]


def test_a_segment_is_sealed_by_count_or_age(own: NewServer, topic: str) -> None:
    never = {"TOPICS_SEGMENT_MAX_AGE_MS": LONG_MS}
    idle = own(**never)
    by_count = own(**never, TOPICS_SEGMENT_MAX_EVENTS="10")
    by_age = own(TOPICS_SEGMENT_MAX_AGE_MS="50")
    for server in (idle, by_count, by_age):
        # There are enough records that their age alone seals them, too.
        server.start().add(topic, *["x" * 1000] * (25 if server is by_count else 5000))
    for server in (by_count, by_age):
        # A write makes the server check for due work.
        def is_sealed(server: Server = server) -> bool:
            server.api.add(topic, 1)
            return bool(names_in(server, "segments", "*.data"))

        eventually(is_sealed, "a segment is sealed", 30)
    assert names_in(idle, "segments", "*.data") == []


def test_what_is_kept_hot_by_count_or_bytes(own: NewServer, topic: str, tmp_path: Path) -> None:
    def cold_after(name: str, retain: dict[str, str]) -> Path:
        cold = tmp_path / name
        server = own(
            TOPICS_COLD_DIR=str(cold),
            TOPICS_SEGMENT_MAX_EVENTS="10",
            TOPICS_WAL_SHARDS="1",
            **retain,
        )
        api = server.start()
        for number in range(100):
            api.add(topic, number)
        eventually(lambda: len(names_in(server, "segments", "*")) > 0, "segments are sealed", 30)
        return cold

    def count(folder: Path) -> int:
        return len(list(folder.rglob("*.data")))

    none_hot = {"TOPICS_HOT_RETAIN_SEGMENTS": "0", "TOPICS_HOT_RETAIN_BYTES": "1"}
    by_count = cold_after("by-count", {**none_hot, "TOPICS_HOT_RETAIN_SEGMENTS": "1000"})
    by_bytes = cold_after("by-bytes", {**none_hot, "TOPICS_HOT_RETAIN_BYTES": str(2**40)})
    moved = cold_after("moved", none_hot)
    eventually(lambda: count(moved) >= 5, "segments move", 30)
    assert count(by_count) == 0
    assert count(by_bytes) == 0


def sleeps_of(server: Server) -> int:
    """How often the server's main thread has slept."""
    assert server.process is not None
    pid = server.process.pid
    status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])


def test_the_server_polls_for_a_lone_client(own: NewServer, topic: str) -> None:
    """A loop that polls does not sleep between two requests of the client."""
    requests = 200

    def sleeps(server: Server) -> int:
        before = sleeps_of(server)
        for _ in range(requests):
            server.api.diff(topic)
        return sleeps_of(server) - before

    for most_us in ("0", "10000"):
        server = own(TOPICS_BUSY_POLL_US=most_us)
        server.start()
        server.api.add(topic, 1)
        if most_us == "0":
            assert sleeps(server) >= requests * 3 / 4
        else:
            eventually(lambda: sleeps(server) < requests / 2, "the loop polls", 60)  # noqa: B023


def test_a_stop_waits_no_longer_than_its_grace(own: NewServer, topic: str) -> None:
    """A request whose body never ends: with the default of 10 s the stop would take that long."""
    server = own(TOPICS_SHUTDOWN_GRACE_MS="1000")
    parts = urlsplit(server.start().url)
    assert parts.port is not None
    with socket.create_connection(("127.0.0.1", parts.port), timeout=30) as sock:
        head = f"POST /v0/topics/{topic} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
        sock.sendall(f"{head}\r\nContent-Length: 1000\r\n\r\n{{".encode())
        server.api.add(topic, 1)  # so that the request before it has been read
        began = time.monotonic()
        assert server.signal(signal.SIGTERM) == 0
        assert time.monotonic() - began < 9


def test_the_log_has_its_level_and_its_format(own: NewServer) -> None:
    loud = own(TOPICS_LOG_FORMAT="json")
    loud.start()
    loud.stop()
    events = [json.loads(line) for line in loud.log.read_text().splitlines()]
    assert any(line["event"].startswith("ready on") for line in events)
    assert {line["level"] for line in events} >= {"info"}
    quiet = own(TOPICS_LOG_LEVEL="error")
    quiet.start()
    quiet.stop()
    assert quiet.log.read_text() == ""


KEY = {"Authorization": "Bearer hush-hush"}


def test_only_clients_with_a_key_get_access(own: NewServer) -> None:
    api = own(TOPICS_API_KEYS="hush-hush:read").start()
    refused(api.http.get("/v0/topics"), 401, "unauthorized")
    assert api.http.get("/v0/topics", headers=KEY).status_code == 200


def test_keys_may_come_from_a_file(own: NewServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("hush-hush:read\n")
    keys.chmod(0o600)
    api = own(TOPICS_API_KEYS_FILE=str(keys)).start()
    refused(api.http.get("/v0/topics"), 401, "unauthorized")
    assert api.http.get("/v0/topics", headers=KEY).status_code == 200


def test_only_listed_names_are_served(own: NewServer) -> None:
    api = own(TOPICS_ALLOWED_HOSTS="events.example").start()
    with httpx.Client(base_url=api.url, trust_env=False) as http:
        assert http.get("/v0/topics", headers={"Host": "events.example"}).status_code == 200
        assert http.get("/v0/topics", headers={"Host": "other.example"}).status_code >= 400


def test_probes_may_ask_for_a_key_too(own: NewServer) -> None:
    server = own(TOPICS_API_KEYS="hush-hush:read", TOPICS_PROBE_AUTH="1")
    server.process = server.spawn()
    told = server.directory / "port"
    eventually(told.exists, "it listens", 30)
    url = f"http://127.0.0.1:{told.read_text().strip()}/v0/health"
    assert httpx.get(url, trust_env=False).status_code == 401
    assert httpx.get(url, headers=KEY, trust_env=False).status_code == 200
