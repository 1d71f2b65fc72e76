"""Randomly changed requests never cause a 500, and nothing in the server
grows.

`./run test-crash tests/crash/hostile/test_fuzz.py --fuzz 50000 --seed 7`; the seed of a failure is
in its message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.contract.driver import Server, eventually, good
from tests.crash.hostile.fuzzing import HONEST, Mutator, problems
from tests.crash.watch.test_slow_watchers import anonymous_bytes, open_sockets

pytestmark = pytest.mark.crash

AT_ONCE: Final = 32
# A request without an answer for this long was incomplete, or asked for a stream.
SILENCE_S: Final = 0.2
GROWN_BYTES_MAX: Final = 300 * 2**20


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    """The number of requests."""
    return int(request.config.getoption("--fuzz", default=2000))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(
        tmp_path / "server",
        {
            "TOPICS_MAX_BODY_BYTES": "100000",
            "TOPICS_MAX_TOPICS": "200",
            "TOPICS_MAX_ROUTERS": "50",
            "TOPICS_ALLOWED_HOSTS": "h,other",
        },
    )
    made.start()
    try:
        yield made
        made.stop()
    finally:
        if made.process is not None:
            made.process.kill()
            made.process.wait()


async def ask(port: int, raw: bytes) -> bytes:
    """The answers to these bytes, followed by an honest request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    try:
        writer.write(raw + HONEST)
        while len(got) < 2**20:
            piece = await asyncio.wait_for(reader.read(65536), SILENCE_S)
            if not piece:
                break
            got += piece
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return got


async def storm(port: int, seed: int, count: int) -> list[str]:
    """Send this many requests, a few at once; return the problems."""
    mutator, wrong, left = Mutator(seed), list[str](), iter(range(count))

    async def one_after_the_other() -> None:
        for number in left:
            raw = mutator.next()
            found = problems(await ask(port, raw))
            if found is not None:
                wrong.append(f"seed {seed}, about request {number}: {raw!r}: {found}")

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
    return wrong


def test_no_request_finds_a_defect(server: Server, count: int, first_seed: int) -> None:
    port = int(server.api.url.rpartition(":")[2])
    assert not asyncio.run(storm(port, first_seed + 1_000_000, 500))
    files, before = open_sockets(server), anonymous_bytes(server)
    wrong = asyncio.run(storm(port, first_seed, count))
    assert not wrong, "\n".join(wrong[:10])
    assert server.process is not None
    assert server.process.poll() is None
    assert good(server.api.http.get("/v0/health"))["status"] == "ok"
    eventually(lambda: open_sockets(server) <= files + 2, "all connections are closed", 60)
    grown = anonymous_bytes(server) - before
    print(f"{count} requests, seed {first_seed}: grown {grown / 2**20:.1f} MiB")
    assert grown < GROWN_BYTES_MAX
    log = server.log.read_text()
    assert "Traceback" not in log, log[-5000:]
    assert "defect" not in log, log[-5000:]
