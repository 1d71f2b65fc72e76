"""Slow, silent and never-reading clients do a well-behaved one no harm.

A real server with short timeouts, and few files in the cap's test. Each kind of crowd is held for a
while beside one honest writer; its p99 with and without them is printed (`-rP`), memory is bounded,
and connections and files are back when the crowd is timed out or gone. At full scale:
`./run test-crash tests/crash/hostile/test_hostile_clients.py --half-open 5000 --never-reading
1000`.
"""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.contract.driver import Server, eventually, good
from tests.crash.hostile.clients import Crowd, Honest, greedy, p99_ms, silence, slow_body, slow_head
from tests.crash.watch.test_slow_watchers import anonymous_bytes, open_sockets

pytestmark = [pytest.mark.crash, pytest.mark.slow]

MIB: Final = 2**20
HEADER_MS: Final = 1000
# Bytes of memory of a connection that only waits for its timeout.
CONNECTION_BYTES_MAX: Final = 40 * 1024
# The unread bytes of all clients count twice: in the answer and in the socket.
UNREAD_BYTES_MAX: Final = 512 * MIB
LOAD_BYTES_MAX: Final = 64 * MIB
SAMPLES: Final = 200


@pytest.fixture
def half_open(request: pytest.FixtureRequest) -> int:
    """The number of connections that are never used, or used slowly."""
    return int(request.config.getoption("--half-open", default=200))


@pytest.fixture
def never_reading(request: pytest.FixtureRequest) -> int:
    """The number of clients that read none of their answers."""
    return int(request.config.getoption("--never-reading", default=20))


@pytest.fixture
def patience() -> dict[str, str]:
    """The server's timeouts: short, so that they end a crowd during the test."""
    return {
        "TOPICS_HEADER_TIMEOUT_MS": str(HEADER_MS),
        "TOPICS_BODY_TIMEOUT_MS": str(HEADER_MS),
        "TOPICS_WRITE_TIMEOUT_MS": str(HEADER_MS),
    }


@pytest.fixture
def server(tmp_path: Path, patience: dict[str, str]) -> Iterator[Server]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 20_000 if hard == resource.RLIM_INFINITY else min(20_000, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    made = Server(tmp_path / "server", patience)
    made.start()
    try:
        made.api.put("honest")
        yield made
        made.stop()
    finally:
        if made.process is not None:
            made.process.kill()
            made.process.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def port_of(server: Server) -> int:
    return int(server.api.url.rpartition(":")[2])


def quiet_p99(server: Server, clients: int) -> float:
    """The honest client's p99 alone, after a warm-up; with more samples in a larger run."""
    with Honest(port_of(server)) as honest:
        honest.append(100, 0.0)
        return p99_ms(honest.append(max(2 * SAMPLES, clients // 2), 0.002))


@pytest.mark.parametrize(
    ("says", "comes_again"),
    [(slow_head, True), (slow_body, True), (silence, True)],
    ids=["slow heads", "slow bodies", "half-open"],
)
def test_slow_clients_are_disconnected_and_harm_no_other(
    server: Server, half_open: int, says: object, comes_again: bool
) -> None:
    quiet_ms = quiet_p99(server, half_open)
    before, files = anonymous_bytes(server), open_sockets(server)
    assert callable(says)
    with (
        Honest(port_of(server)) as honest,
        Crowd(port_of(server), half_open, says, comes_again=comes_again) as crowd,
    ):
        samples: list[float] = []
        most = 0
        while crowd.ended < half_open or len(samples) < SAMPLES:
            samples += honest.append(50, 0.002)
            most = max(most, anonymous_bytes(server) - before)
            assert len(samples) < 50_000, f"{crowd.ended} of {half_open} were ended"
        loud_ms = p99_ms(samples)
    eventually(lambda: open_sockets(server) <= files + 2, "all are closed", 60)
    print(
        f"{half_open} clients, {crowd.opened} connections, {crowd.ended} ended: honest p99 "
        f"{loud_ms:.2f} ms, alone {quiet_ms:.2f} ms ({loud_ms / quiet_ms:.1f} times); grown "
        f"{most / MIB:.1f} MiB"
    )
    assert loud_ms < max(50 * quiet_ms, 500)
    assert most < LOAD_BYTES_MAX + half_open * CONNECTION_BYTES_MAX


@pytest.mark.parametrize("says", [slow_head, slow_body, silence])
@pytest.mark.parametrize("patience", [{}], ids=["as it comes"])
def test_a_server_as_it_comes_holds_slow_clients_and_serves_honest_ones(
    server: Server, half_open: int, says: Callable[[int, int], bytes]
) -> None:
    """At full scale the test lasts long enough (ten seconds) that the server ends the first slow
    clients.
    """
    quiet_ms = quiet_p99(server, half_open)
    with (
        Honest(port_of(server)) as honest,
        Crowd(port_of(server), half_open, says, comes_again=True) as crowd,
    ):
        eventually(lambda: open_sockets(server) >= half_open, "all are held at once", 30)
        samples = honest.append(max(SAMPLES, half_open), 0.002)
        loud_ms = p99_ms(samples)
        print(
            f"{half_open} clients with {says.__name__}, {crowd.ended} ended: honest p50 "
            f"{statistics.median(samples) * 1000:.2f} ms, p99 {loud_ms:.2f} ms, alone "
            f"{quiet_ms:.2f} ms ({loud_ms / quiet_ms:.1f} times)"
        )
    assert loud_ms < max(50 * quiet_ms, 500)


def test_clients_that_never_read_are_disconnected_and_harm_no_other(
    server: Server, never_reading: int
) -> None:
    # A page has 4 MiB, more than two sockets' buffers can hold.
    for _ in range(4):
        server.api.add("large", "x" * 999_000)
    quiet_ms = quiet_p99(server, never_reading)
    before, files = anonymous_bytes(server), open_sockets(server)
    with (
        Honest(port_of(server)) as honest,
        Crowd(port_of(server), never_reading, greedy) as crowd,
    ):
        samples: list[float] = []
        most = 0
        while len(samples) < SAMPLES or open_sockets(server) > files + 2:
            samples += honest.append(50, 0.002)
            most = max(most, anonymous_bytes(server) - before)
            assert len(samples) < 50_000, "not all were ended"
        loud_ms = p99_ms(samples)
    print(
        f"{never_reading} clients that never read ({crowd.opened} connections): honest p99 "
        f"{loud_ms:.2f} ms, alone {quiet_ms:.2f} ms ({loud_ms / quiet_ms:.1f} times); grown "
        f"{most / MIB:.1f} MiB"
    )
    assert loud_ms < max(50 * quiet_ms, 2000)
    assert most < LOAD_BYTES_MAX + UNREAD_BYTES_MAX
    good(server.api.state("large"))


def test_a_flood_leaves_files_for_the_store(tmp_path: Path) -> None:
    """Above the cap, connections that are opened repeatedly stop neither reads nor segments."""
    made = Server(
        tmp_path / "few",
        {
            "TOPICS_MAX_CONNECTIONS": "100",
            "TOPICS_SEGMENT_MAX_EVENTS": "50",
            "TOPICS_SEGMENT_MAX_AGE_MS": "1000",
        },
    )
    made.start()
    try:
        made.api.put("honest")
        with (
            Honest(port_of(made)) as honest,
            Crowd(port_of(made), 300, silence, comes_again=True),
        ):
            honest.append(299, 0.002)
            assert open_sockets(made) < 200
        eventually(lambda: open_sockets(made) < 20, "all are closed", 60)
        assert made.api.get_state("honest")["head_seq"] == 300
        eventually(lambda: any(made.data_dir.glob("segments/*/*.data")), "segments", 60)
        made.stop()
    finally:
        if made.process is not None:
            made.process.kill()
            made.process.wait()
