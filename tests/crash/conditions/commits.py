"""Readers that commit their consumers while their server is killed."""

from __future__ import annotations

import asyncio
from typing import Final

import httpx

RECORDS: Final = 2_000
WITHIN_S: Final = 60.0


class Committers:
    """So many consumers of one topic, each committed in steps; `acknowledged`: its last answer."""

    def __init__(self, url: str, consumers: int) -> None:
        self.acknowledged = {f"c{number}": 0 for number in range(consumers)}
        self.commits = 0
        self._url = url
        self._moved = asyncio.Event()
        self._stopping = False

    def stop(self) -> None:
        """Let every consumer finish its commit."""
        self._stopping = True

    async def until(self, count: int) -> None:
        """Return when so many commits are acknowledged."""
        while self.commits < count:
            self._moved.clear()
            await self._moved.wait()

    async def run(self) -> None:
        """Commit until stopped."""
        limits = httpx.Limits(max_connections=32)
        async with (
            httpx.AsyncClient(base_url=self._url, trust_env=False, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            for number, name in enumerate(self.acknowledged):
                group.create_task(self._commit_all(http, name, 1 + number % 7))

    async def _commit_all(self, http: httpx.AsyncClient, name: str, step: int) -> None:
        async with asyncio.timeout(20 * WITHIN_S):
            while not self._stopping and self.acknowledged[name] + step <= RECORDS:
                seq = self.acknowledged[name] + step
                try:
                    answer = await http.post(
                        f"/v0/topics/t/consumers/{name}/commit", json={"seq": seq}, timeout=30
                    )
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
                    continue
                if answer.status_code != 200:
                    assert answer.status_code in (429, 503), answer.text
                    await asyncio.sleep(0.05)
                    continue
                assert answer.json()["seq"] == seq
                self.acknowledged[name] = seq
                self.commits += 1
                self._moved.set()
