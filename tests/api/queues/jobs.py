"""A node with queues behind the application: the verbs of §10, a clock that tests move, workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import httpx

from tests.api.watch.streams import WITHIN_S, Frame, Live, Reader
from tests.storage.fake_disk import FakeDisk
from tests.unit.test_node import opened
from topics_server.queue.service import QueueService


def code_of(answer: httpx.Response) -> tuple[int, str, object]:
    """The status of a refusal, its code, and the field that it names."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error.get("detail", {}).get("field")


class Jobs(Live):
    """One ready server and its queues. Answers are the bodies of a 200."""

    @classmethod
    async def start(cls, disk: FakeDisk, **settings: object) -> Jobs:
        """See `Live`."""
        return cls(await opened(disk, boot_id=None, **settings).start())

    @property
    def queues(self) -> QueueService:
        assert self.node.state.queues is not None
        return self.node.state.queues

    async def queue(self, name: str = "jobs", **config: object) -> None:
        """Make a queue."""
        await self.ok("PUT", f"/v0/topics/{name}", {"type": "queue", **config})

    async def put(self, *datas: object, queue: str = "jobs", **fields: Any) -> int:
        """Append jobs; return the seq of the last."""
        records = [{"data": data, **fields} for data in datas]
        told = await self.ok("POST", f"/v0/topics/{queue}", {"records": records})
        return int(told["last_seq"])

    async def call(self, verb: str, queue: str = "jobs", **body: Any) -> httpx.Response:
        """POST an unchanged body to one of the verbs."""
        return await self.http.post(f"/v0/topics/{queue}/{verb}", json=body)

    async def do(self, verb: str, queue: str = "jobs", **body: Any) -> Any:
        """The body of a verb's 200, without the timings."""
        answer = await self.call(verb, queue, **body)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        told.pop("performance")
        return told

    async def claim(self, node: str = "w", max: int = 1, **more: Any) -> list[Any]:
        """Claim, and return the jobs."""
        told = await self.do("claim", node=node, max=max, **more)
        assert told["count"] == len(told["claimed"])
        return list(told["claimed"])

    async def seqs(self, node: str = "w", max: int = 1, **more: Any) -> list[int]:
        """Claim, and return the seqs."""
        return [job["$seq"] for job in await self.claim(node, max, **more)]

    async def counts(self, queue: str = "jobs") -> tuple[int, int, int, int]:
        """ready, in_flight, delayed, dead_lettered."""
        told = await self.ok("GET", f"/v0/topics/{queue}")
        names = ("ready", "in_flight", "delayed", "dead_lettered")
        return tuple(told["queue"][name] for name in names)

    async def datas(self, topic: str) -> list[Any]:
        """All records of a topic, by a diff."""
        told = await self.ok("POST", f"/v0/topics/{topic}/diff", {"from_seq": 0, "limit": 1000})
        return list(told["records"])

    async def ok(self, method: str, path: str, body: object = None) -> Any:
        answer = await self.http.request(method, path, json=body)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    def pass_time(self, by_ms: int) -> None:
        """Move the clocks, and run the due timers."""
        self.clock.move(by_ms)
        self.queues.tick()

    def work(self, queue: str = "jobs", *, room: bool = True, **query: object) -> Worker:
        """Open a push stream."""
        fields = {"node": "w", **query}
        return Worker(self.app, queue, urlencode({k: str(v) for k, v in fields.items()}), room)

    def waiting(self, queue: str = "jobs") -> int:
        """The number of waiting claims and streams."""
        topic = self.node.registry.find(queue)
        line = None if topic is None else self.queues.dispatcher.queues.get(topic.topic_id)
        return 0 if line is None else len(line.claimers)

    async def in_line(self, count: int, queue: str = "jobs") -> None:
        """Return when this many claims and streams are waiting."""
        await until(lambda: self.waiting(queue) == count)


class Worker(Reader):
    """The client side of a push stream."""

    def __init__(self, app: Any, queue: str, query: str, room: bool) -> None:
        path = f"/v0/topics/{queue}/work"
        super().__init__(app, path, room=room, query=query.encode())

    async def jobs(self, count: int) -> list[Frame]:
        """The next `job` frames."""
        frames = await self.take(count)
        assert [frame.event for frame in frames] == ["job"] * count
        assert all(frame.id == str(frame.data["$seq"]) for frame in frames)
        return frames

    async def seqs(self, count: int) -> list[int]:
        """The seqs of the next jobs."""
        return [frame.data["$seq"] for frame in await self.jobs(count)]


async def until(holds: Callable[[], bool]) -> None:
    """Run turns of the loop until the condition holds."""
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await turns(1)


async def turns(count: int = 20) -> None:
    """Run all callbacks that are ready."""
    for _ in range(count):
        await asyncio.sleep(0)
