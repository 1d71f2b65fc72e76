"""Stalled uploads of one key cost bounded memory and no time of others.

A real server with two keys and a budget for bodies being received. One key begins many large
uploads and never ends them; refused ones start again. A client of another key appends small records
and uploads large bodies, which all succeed. At full scale: `./run test-crash
tests/crash/hostile/test_uploads.py --uploads 200 --upload-mib 60`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest
from websockets.asyncio.client import connect

from tests.contract.driver import Server, eventually, good
from tests.crash.hostile.clients import Honest, p99_ms
from tests.crash.hostile.test_hostile_clients import port_of
from tests.crash.hostile.uploads import StalledUploads
from tests.crash.watch.test_slow_watchers import anonymous_bytes

pytestmark = pytest.mark.crash

MIB: Final = 2**20
ATTACKER: Final = "attacker-key"
HONEST: Final = "honest-key"
SAMPLES: Final = 300
# Each byte of the budget may be in memory twice for a moment; beside it the sockets and the log.
BESIDE_BYTES_MAX: Final = 64 * MIB


@pytest.fixture
def size(request: pytest.FixtureRequest) -> int:
    """Bytes of one upload."""
    return MIB * int(request.config.getoption("--upload-mib", default=4))


@pytest.fixture
def budget(size: int) -> int:
    """The budget for all bodies being received: the default for 64 MiB bodies, in proportion."""
    return 4 * size


@pytest.fixture
def server(tmp_path: Path, size: int, budget: int) -> Iterator[Server]:
    made = Server(
        tmp_path / "server",
        {
            "TOPICS_API_KEYS": f"{ATTACKER},{HONEST}",
            "TOPICS_MAX_RECEIVING_BYTES": str(budget),
            "TOPICS_MAX_BODY_BYTES": str(size),
            "TOPICS_MAX_WS_MESSAGE_BYTES": str(size),
        },
    )
    made.start()
    try:
        made.api.http.headers["Authorization"] = f"Bearer {HONEST}"
        made.api.put("honest")
        yield made
        made.stop()
    finally:
        if made.process is not None:
            made.process.kill()
            made.process.wait()


def metrics(server: Server) -> dict[str, float]:
    """The metrics without labels."""
    text = server.api.http.get("/v0/metrics").text
    rows = [line.split(" ") for line in text.splitlines() if "{" not in line and line[:1] != "#"]
    return {name: float(value) for name, value in rows}


def test_stalled_uploads_of_one_key_harm_no_other(
    server: Server, request: pytest.FixtureRequest, size: int, budget: int
) -> None:
    count = int(request.config.getoption("--uploads", default=40))
    with Honest(port_of(server), HONEST) as honest:
        honest.append(200, 0.0)
        quiet_ms = p99_ms(honest.append(SAMPLES, 0.002))
    before = anonymous_bytes(server)
    most = 0
    with (
        Honest(port_of(server), HONEST) as honest,
        StalledUploads(port_of(server), count, size, ATTACKER) as uploads,
    ):
        # All connections begin at once, and the kernel takes their first megabytes.
        burst_ms = p99_ms(honest.append(SAMPLES, 0.002))
        samples: list[float] = []
        while uploads.refused < count or len(samples) < SAMPLES:
            samples += honest.append(50, 0.002)
            most = max(most, anonymous_bytes(server) - before)
            assert len(samples) < 20_000, f"{uploads.refused} of {count} were refused"
        loud_ms = p99_ms(samples)
        held = metrics(server)
        # The server receives a large body of the other key while the budget is used up.
        body = b'{"records":[%b{"data":1}]}' % (b" " * (size - 40))
        headers = {"Content-Type": "application/json"}
        for _ in range(3):
            began = time.monotonic()
            good(server.api.http.post("/v0/topics/honest", content=body, headers=headers))
            took_s = time.monotonic() - began
        refused, reset, sent = uploads.refused, uploads.reset, uploads.sent
    print(
        f"{count} uploads of {size / MIB:.0f} MiB, {sent / MIB:.0f} MiB sent, {refused} refused, "
        f"{reset} reset: honest p99 {loud_ms:.2f} ms, alone {quiet_ms:.2f} ms "
        f"({loud_ms / quiet_ms:.1f} times), {burst_ms:.2f} ms while they begin, "
        f"an honest upload {took_s:.2f} s; grown "
        f"{most / MIB:.1f} MiB of a budget of {budget / MIB:.0f} MiB"
    )
    assert held["topics_receiving_bytes"] <= budget == held["topics_receiving_bytes_max"]
    assert held["topics_receiving_refused_total"] >= count
    assert reset == 0, "whoever is refused reads why"
    assert most <= 2 * budget + BESIDE_BYTES_MAX
    assert max(loud_ms, burst_ms) < max(50 * quiet_ms, 500)


def test_a_client_that_sends_everything_before_it_reads_gets_the_reason(
    server: Server, size: int, budget: int
) -> None:
    """One key uses up the budget: its uploads that stalled longest are ended first."""
    url = server.api.url
    answers: list[httpx.Response] = []

    def stall() -> None:
        """Send half of a body, nothing for a while, and the rest."""

        def body() -> Iterator[bytes]:
            yield b" " * (size // 2)
            time.sleep(2.0)
            yield b" " * (size - size // 2)

        with httpx.Client(trust_env=False, timeout=30) as client:
            headers = {
                "Authorization": f"Bearer {HONEST}",
                "Content-Type": "application/json",
                "Content-Length": str(size),
            }
            answers.append(client.post(f"{url}/v0/topics/honest", content=body(), headers=headers))

    threads = [threading.Thread(target=stall) for _ in range(3 * budget // size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == len(threads)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= budget // size
    assert {answer.status_code for answer in answers} <= {400, 429}
    for answer in refused:
        error = answer.json()["error"]
        assert error["code"] == "throttled"
        assert error["detail"] == {"limit": "max_receiving_bytes", "max": budget}
        assert int(answer.headers["retry-after"]) >= 1


async def _stalled_message(url: str, key: str, size: int, fragments: int) -> object:
    """Begin one message in fragments and never end it; return the server's message and close
    code.
    """

    async def pieces(stop: asyncio.Event) -> AsyncIterator[str]:
        for _ in range(fragments):
            yield " " * (size // fragments)
        await stop.wait()

    stop = asyncio.Event()
    headers = {"Authorization": f"Bearer {key}"}
    # The server closes it: the client's own close fails on a connection that is lost already.
    socket = await connect(url, additional_headers=headers, max_queue=None)
    sending = asyncio.ensure_future(socket.send(pieces(stop)))
    try:
        told = json.loads(await socket.recv())
        await socket.wait_closed()
        return told, socket.close_code
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        if not socket.transport.is_closing():
            socket.transport.abort()


def test_messages_of_websockets_count_in_the_budget(server: Server, size: int, budget: int) -> None:
    """Fragments of an unfinished message count as bytes being received, however small they are."""
    url = server.api.url.replace("http", "ws", 1) + "/v0/ws"
    count = 3 * budget // size

    async def run() -> list[object]:
        tasks = [
            asyncio.ensure_future(_stalled_message(url, ATTACKER, size * 3 // 4, 16))
            for _ in range(count)
        ]
        done: set[asyncio.Future[object]] = set()
        async with asyncio.timeout(30):
            # Each upload holds 0.75 of a size, so there is room for five.
            while len(done) < count - 5:
                done = {task for task in tasks if task.done()}
                await asyncio.sleep(0.05)
        headers = {"Authorization": f"Bearer {HONEST}"}
        async with connect(url, additional_headers=headers) as socket:
            await socket.send('{"op":"publish","topic":"honest","records":[{"data":1}]}')
            assert json.loads(await socket.recv())["op"] == "ack"
        assert metrics(server)["topics_receiving_bytes"] <= budget
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in done]

    for told in asyncio.run(run()):
        assert isinstance(told, tuple)
        error, code = told
        assert code == 1013
        assert error["code"] == "throttled"
        assert error["detail"] == {"limit": "max_receiving_bytes", "max": budget}
    eventually(lambda: metrics(server)["topics_receiving_bytes"] == 0, "nothing is held", 30)
