"""§0.2, §0.11, §11 and settled rules: the settings in the environment, and when the server refuses
to start.
"""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, good, refused


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def _message(output: str) -> str:
    lines = [line for line in output.strip().splitlines() if line.strip()]
    assert "Traceback" not in output, output
    assert len(lines) == 1, f"one line, not {len(lines)}: {output}"
    return lines[0]


def test_port_0_binds_a_free_port_and_writes_it(own: NewServer) -> None:
    """Settled rules of the contract [S-07, 0.2-32]"""
    server = own()
    api = server.start()
    port = (server.directory / "port").read_text().strip()
    assert int(port) == urlsplit(api.url).port
    assert int(port) > 0


def test_the_port_is_a_setting(own: NewServer) -> None:
    """Contract §0.2, settled rules [0.2-32, S-09]"""
    port = _free_port()
    api = own(TOPICS_PORT=str(port)).start()
    assert urlsplit(api.url).port == port


def test_the_host_may_carry_the_port(own: NewServer) -> None:
    """Settled rules of the contract [S-09]"""
    port = _free_port()
    server = own(TOPICS_HOST=f"127.0.0.1:{port}")
    api = server.start()
    assert urlsplit(api.url).port == port


def test_an_unconfigured_server_binds_loopback_only(own: NewServer) -> None:
    """Contract §0.2 [0.2-30]"""
    api = own().start()
    port = urlsplit(api.url).port
    assert port is not None
    listening = _listening(port)
    assert listening
    assert listening <= {"0100007F", "00000000000000000000000001000000"}


def _listening(port: int) -> set[str]:
    """Local addresses (hex, as the kernel prints them) that listen on `port`."""
    found: set[str] = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if not table.exists():
            continue
        for line in table.read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            host, _, number = address.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(host)
    return found


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0.0.0.0:0"])
def test_an_open_bind_without_keys_refuses_to_start(own: NewServer, host: str) -> None:
    """Contract §0.2 [0.2-31]"""
    line = _message(own(TOPICS_HOST=host).refusal())
    assert "TOPICS_ALLOW_INSECURE_NO_AUTH" in line


def test_an_open_bind_may_be_insisted_on(own: NewServer) -> None:
    """Contract §0.2 [0.2-31]"""
    server = own(TOPICS_HOST="0.0.0.0", TOPICS_ALLOW_INSECURE_NO_AUTH="1")
    assert good(server.start().http.get("/v0/health"))["status"] == "ok"


@pytest.mark.parametrize(
    "keys",
    [
        "secret-key-1:reed",
        "secret-key-1:read+",
        "secret-key-1:READ",
        "secret-key-1::secret/",
        "secret-key-1:read,",
        "secret-key-1,secret-key-1:read",
        ":read",
        "secret key-1",
    ],
)
def test_malformed_keys_refuse_to_start_and_are_not_shown(own: NewServer, keys: str) -> None:
    """Contract §0.2 [0.2-26, S-85]"""
    line = _message(own(TOPICS_API_KEYS=keys).refusal())
    assert line.startswith("TOPICS_API_KEYS: entry ")
    assert "secret" not in line
    assert "reed" not in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOPICS_PORT", "seventy"),
        ("TOPICS_PORT", "65536"),
        ("TOPICS_PORT", "-1"),
        ("TOPICS_WAL_SHARDS", "0"),
        ("TOPICS_WAL_SHARDS", "x"),
        ("TOPICS_MAX_LIMIT", "-5"),
        ("TOPICS_SEGMENT_MAX_EVENTS", "many"),
        ("TOPICS_DATA_DIR_MODE", "0777"),
        ("TOPICS_DATA_DIR_MODE", "0755"),
        ("TOPICS_DATA_DIR_MODE", "private"),
    ],
)
def test_a_malformed_setting_refuses_to_start_by_name(
    own: NewServer, name: str, value: str
) -> None:
    """Settled rules of the contract [S-80, S-09]"""
    assert name in _message(own(**{name: value}).refusal())


def test_the_data_directory_may_be_open_to_its_group(own: NewServer) -> None:
    """Settled rules of the contract [S-80]"""
    server = own(TOPICS_DATA_DIR_MODE="0750")
    server.start()
    assert server.data_dir.stat().st_mode & 0o777 == 0o750


def test_the_data_live_where_the_setting_says(own: NewServer, tmp_path: Path, topic: str) -> None:
    """Settled rules of the contract [S-08]"""
    elsewhere = tmp_path / "deep" / "elsewhere"
    server = own(TOPICS_DATA_DIR=str(elsewhere))
    server.start().add(topic, 1)
    server.stop()
    assert any(elsewhere.iterdir())
    assert not server.data_dir.exists()
    assert own(TOPICS_DATA_DIR=str(elsewhere)).start().get_state(topic)["head_seq"] == 1


def test_the_data_live_in_topics_data_by_default(own: NewServer, topic: str) -> None:
    """Settled rules of the contract [S-08]"""
    server = own(TOPICS_DATA_DIR="")
    server.start().add(topic, 1)
    assert any((server.directory / "topics-data").iterdir())


def test_the_server_speaks_plain_http_only(own: NewServer) -> None:
    """§0.2, §0.11: a TLS hello gets no TLS answer, and no setting offers one. [0.2-33, 0.11-02]"""
    api = own().start()
    parts = urlsplit(api.url)
    assert parts.hostname is not None
    assert parts.port is not None
    hello = bytes.fromhex("160301002a010000260303") + bytes(35)
    with socket.create_connection((parts.hostname, parts.port), timeout=5) as sock:
        sock.sendall(hello + b"\r\n\r\n")
        try:
            answer = sock.recv(1000)
        except (ConnectionResetError, TimeoutError):
            answer = b""
    assert answer[:1] not in (b"\x16", b"\x15")


def test_the_background_sync_is_a_setting(own: NewServer, topic: str) -> None:
    """Settled rules of the contract [S-14]"""

    def syncs(api: Api) -> float:
        lines = api.http.get("/v0/metrics").text.splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("topics_wal_fsyncs_total"))

    api = own(TOPICS_WAL_FSYNC_INTERVAL_MS="20", TOPICS_WAL_SHARDS="1").start()
    api.put(topic, {"durability": "disk"})
    before = syncs(api)
    for number in range(3000):
        api.add(topic, number)
        if number % 100 == 99 and syncs(api) > before + 2:
            return
    raise AssertionError("3,000 appends of class disk were not followed by background syncs")


def test_the_number_of_topics_can_be_capped(own: NewServer) -> None:
    """§11, §0.6: the cap refuses creations by PUT and by append; writes to existing topics are
    accepted. [0.6-11, 11-02, 11-12, 11-13]
    """
    api = own(TOPICS_MAX_TOPICS="2").start()
    api.put("one")
    api.add("two", 1)
    for answer in (api.put("three"), api.append("three", [{"data": 1}])):
        detail = refused(answer, 429, "throttled")
        assert (detail["limit"], detail["max"]) == ("max_topics", 2)
        assert int(answer.headers["retry-after"]) >= 0
    assert api.put("one", {"ttl_ms": 5}).status_code == 200
    assert api.append("two", [{"data": 2}]).status_code == 200
    api.drop("one")
    assert api.put("three").status_code == 201


def test_the_total_of_bytes_can_be_capped(own: NewServer) -> None:
    """Contract §11, §0.6 [0.6-11, 11-08, 11-12]"""
    api = own(TOPICS_MAX_TOTAL_BYTES="10000").start()
    api.add("one", "x" * 4000)
    api.add("two", "x" * 4000)
    answer = api.append("two", [{"data": "x" * 4000}])
    detail = refused(answer, 429, "throttled")
    assert (detail["limit"], detail["max"]) == ("max_total_bytes", 10_000)
    assert int(answer.headers["retry-after"]) >= 0
    assert api.get_state("two")["head_seq"] == 1
    api.delete("one", before_seq=2)
    assert api.add("two", "x" * 4000)["seqs"] == [2]
