"""Readers that commit their consumers while their server is killed."""

from __future__ import annotations

import asyncio
from typing import Final

from tests.crash.watch.watch_wire import Broken, Http

RECORDS: Final = 2_000
# The number of connections; each commits for its share of the consumers, one after the other.
CLIENTS: Final = 32


class Committers:
    """Many consumers of one topic, each committed in steps; `acknowledged`: the last acknowledged
    commit of each.
    """

    def __init__(self, port: int, consumers: int) -> None:
        self.acknowledged = {f"c{number}": 0 for number in range(consumers)}
        self.commits = 0
        self._port = port
        self._moved = asyncio.Event()
        self._over = asyncio.Event()

    def stop(self) -> None:
        """Let every client finish its commit."""
        self._over.set()

    async def until(self, count: int) -> None:
        """Return when so many commits are acknowledged."""
        while self.commits < count:
            self._moved.clear()
            await self._moved.wait()

    async def run(self) -> None:
        """Commit until stopped, or until every consumer is at the end."""
        numbers = range(len(self.acknowledged))
        async with asyncio.TaskGroup() as group:
            for first in range(min(CLIENTS, len(numbers))):
                group.create_task(self._commit_in_turn(numbers[first::CLIENTS]))

    async def _commit_in_turn(self, numbers: range) -> None:
        client = Http(self._port)
        try:
            left = list(numbers)
            while left and not self._over.is_set():
                for number in left:
                    if not self._over.is_set():
                        await self._commit(client, f"c{number}", 1 + number % 7)
                left = [each for each in left if self.acknowledged[f"c{each}"] + 7 <= RECORDS]
        finally:
            client.close()

    async def _commit(self, client: Http, name: str, step: int) -> None:
        """Send one commit; if it gets no answer, the next one repeats it."""
        seq = self.acknowledged[name] + step
        try:
            path = f"/v0/topics/t/consumers/{name}/commit"
            status, answer = await client.ask("POST", path, {"seq": seq})
        except Broken:
            client.close()
            await asyncio.sleep(0.05)
            return
        if status != 200:
            assert status in (429, 503), answer
            await asyncio.sleep(0.05)
            return
        assert answer["seq"] == seq
        self.acknowledged[name] = seq
        self.commits += 1
        self._moved.set()
