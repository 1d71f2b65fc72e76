"""The load of connections that each send a request as soon as the last one is answered.

Bounded: by the seconds, after which no request is sent, by the number of connections, and by
`STALL_S`, after which a server that does not answer is given up. A refusal ends the load, except a
429: the connection pauses for as long as the server asks.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Final

import msgspec

from topics_server.cli.benching.connections import Link, opened
from topics_server.cli.benching.measured import Sample
from topics_server.cli.benching.requests import Script
from topics_server.cli.connection import ServerUnreachable, refusal, refused
from topics_server.runtime.clock import cpu_s, monotonic_s

STALL_S: Final = 30.0
# A pause after a 429 that names none.
PAUSE_S: Final = 0.05


class Load:
    """What every load counts, and how it ends: once, with an error or without one."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url = url
        self.latencies_s = array("d")
        self.records = 0
        self.errors = 0
        self.first_error: str | None = None
        self.fatal: Exception | None = None
        self.seconds = seconds
        self._ended = asyncio.get_running_loop().create_future()
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._last_s = self._began_s = self.end_s = 0.0
        self._cpu_s = 0.0

    async def open(self, link: Link) -> Link:
        """Open a connection of this load; it is closed with the load."""
        self._links.add(link)
        return await opened(self.url, link)

    def begin(self) -> None:
        """Start the time."""
        self._cpu_s = cpu_s()
        self._began_s = self._last_s = monotonic_s()
        self.end_s = self._began_s + self.seconds

    def count(self, latency_s: float, records: int, now_s: float) -> None:
        """Count one successful request."""
        self.latencies_s.append(latency_s)
        self.records += records
        self._last_s = now_s

    def received(self, link: Link, piece: bytes) -> None:
        """Get a piece of a stream; only a load with a stream has any."""

    def failed(self, error: Exception) -> None:
        """End the load with this error."""
        self.errors += 1
        self.first_error = self.first_error or str(error)
        self.fatal = self.fatal or error
        self.end()

    def end(self) -> None:
        """End the load."""
        if not self._ended.done():
            self._ended.set_result(None)

    def retire(self, link: Link) -> None:
        """Close one connection; the load ends with the last one."""
        link.retire()
        self._links.discard(link)
        if not self._links:
            self.end()

    def refuse(self, status: int, body: bytes, *, may_pause: bool = True) -> float | None:
        """Count a refusal; the pause in seconds after which to go on, None if the load ends."""
        error = refusal(status, None, body)
        if status != 429 or not may_pause:
            self.failed(error)
            return None
        self.errors += 1
        self.first_error = self.first_error or str(error)
        return max(error.retry_after_s or PAUSE_S, PAUSE_S)

    def later(self, pause_s: float, action: Callable[[], None]) -> None:
        """Call `action` after a pause."""
        self._timers.append(asyncio.get_running_loop().call_later(pause_s, action))

    def spawn(self, link: Link, then: Callable[[Link], None]) -> None:
        """Open a further connection beside the running ones."""

        async def go() -> None:
            try:
                then(await self.open(link))
            except ServerUnreachable as error:
                self.failed(error)

        task = asyncio.get_running_loop().create_task(go())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def result(self) -> Sample:
        """The counts, once the load has ended."""
        try:
            async with asyncio.timeout(self.seconds + STALL_S):
                await self._ended
        except TimeoutError:
            why = f"{self.url} did not answer within {STALL_S:g} s"
            self.failed(ServerUnreachable(why, sent=True))
        finally:
            spent_s = cpu_s() - self._cpu_s
            self.close()
        return Sample(
            latencies_s=self.latencies_s,
            records=self.records,
            errors=self.errors,
            seconds=self._last_s - self._began_s,
            cpu_s=spent_s,
            first_error=self.first_error,
        )

    def close(self) -> None:
        """Close all connections."""
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        for link in self._links:
            link.retire()
        self._links.clear()


class ClosedLoop(Load):
    """Connections that take the requests of one script."""

    def __init__(self, url: str, script: Script, seconds: float) -> None:
        super().__init__(url, seconds)
        self._script = script

    async def run(self, connections: int) -> Sample:
        """Open the connections, let them send, and wait for the end."""
        try:
            links = [await self.open(self._link()) for _ in range(connections)]
        except BaseException:
            self.close()
            raise
        self.begin()
        for link in links:
            self._next(link, is_first=True)
        return await self.result()

    def _link(self) -> Link:
        return Link(self.url, self, keeps_bodies=self._script.keeps_bodies)

    def answered(self, link: Link, status: int, body: bytes) -> None:
        """Count an answer and send the next request."""
        now_s = monotonic_s()
        if status < 300:
            try:
                records = self._script.took(body)
            except msgspec.DecodeError as error:
                why = f"this answer is not from a topics server: {error}"
                self.failed(refused(status, "bad_answer", why))
                return
            if records:
                self.count(now_s - link.sent_s, records, now_s)
        else:
            pause_s = self.refuse(status, body)
            if pause_s is None:
                return
            if now_s + pause_s >= self.end_s:
                self.retire(link)
            else:
                self.later(pause_s, lambda: self._next(link))
            return
        self._next(link)

    def _next(self, link: Link, *, is_first: bool = False) -> None:
        """Send the next request, on a new connection if the old one ends with its last answer.

        Each connection sends a first request, however late a busy machine lets it.
        """
        request = self._script.next() if is_first or monotonic_s() < self.end_s else None
        if request is None:
            self.retire(link)
        elif link.is_retired:
            return
        elif link.stays_open:
            link.send(request)
        else:
            fresh = self._link()
            self._links.add(fresh)
            self.retire(link)
            self.spawn(fresh, lambda opened: opened.send(request))
