"""One queue by its endpoints (§10), for the contract tests of queues.

Owns the paths and the usual bodies; checks that an answer is no error and returns it unchanged.
`post` sends any body. Waits have deadlines; tests of expiry use the shortest possible lease. Used
by `tests/contract/test_queue_*.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from tests.contract.driver import Api, Json, eventually, good
from tests.contract.streams.streams import SseStream

# The shortest lease that the contract allows, and one longer than any test.
SHORT_MS: Final = 100
LONG_MS: Final = 600_000
ACTIONS: Final = ("claim", "ack", "nack", "extend")


@dataclass(slots=True)
class Queue:
    """The queue of this name on a server; `api` may be replaced after a restart."""

    api: Api
    name: str

    @classmethod
    def made(cls, api: Api, name: str, **config: object) -> Queue:
        """Create a new queue with this configuration."""
        queue = cls(api, name)
        assert queue.put(**config)["created"] is True
        return queue

    @property
    def path(self) -> str:
        """The path of the queue's topic."""
        return f"/v0/topics/{self.name}"

    def put(self, **config: object) -> Json:
        """PUT the configuration."""
        return good(self.api.put(self.name, {"type": "queue", **config}))

    def add(self, *datas: object, **record: object) -> list[int]:
        """Append one job for each datum; return their seqs."""
        seqs: list[int] = self.api.add(self.name, *datas, **record)["seqs"]
        return seqs

    def post(self, action: str, body: object) -> httpx.Response:
        """POST a body to an endpoint of the queue, unchecked."""
        return self.api.http.post(f"{self.path}/{action}", json=body)

    def claim(self, node: str = "a", most: int = 1, **fields: object) -> Json:
        """The whole answer to a claim."""
        return good(self.post("claim", {"node": node, "max": most, **fields}))

    def take(self, node: str = "a", most: int = 1, **fields: object) -> list[Json]:
        """Claim and return the jobs; with `wait_ms` all that arrive within a generous time."""
        answer = self.claim(node, most, **fields)
        jobs: list[Json] = answer["claimed"]
        assert answer["count"] == len(jobs) <= most
        assert seqs_of(jobs) == sorted(set(seqs_of(jobs)))
        return jobs

    def soon(self, node: str = "a", most: int = 1, **fields: object) -> list[Json]:
        """Repeat a claim until a job arrives, which must happen within a few seconds."""
        found: list[Json] = []

        def try_it() -> bool:
            found.extend(self.take(node, most, **fields))
            return bool(found)

        eventually(try_it, "a job can be claimed")
        return found

    def ack(self, node: str, seqs: Sequence[int], **fields: object) -> Json:
        """The answer to an ack."""
        return good(self.post("ack", {"node": node, "seqs": list(seqs), **fields}))

    def nack(self, node: str, seqs: Sequence[int], **fields: object) -> Json:
        """The answer to a nack."""
        return good(self.post("nack", {"node": node, "seqs": list(seqs), **fields}))

    def extend(self, node: str, seqs: Sequence[int], lease_ms: int, **fields: object) -> Json:
        """The answer to an extend."""
        body = {"node": node, "seqs": list(seqs), "lease_ms": lease_ms, **fields}
        return good(self.post("extend", body))

    def redrive(self, **fields: object) -> Json:
        """The answer to a redrive."""
        return good(self.post("redrive", fields))

    def state(self) -> Json:
        """The topic's state."""
        return self.api.get_state(self.name)

    def counts(self) -> tuple[int, int, int]:
        """`ready`, `in_flight`, `dead_lettered`; they must agree with the live count."""
        state = self.state()
        queue = state["queue"]
        held_back = state["count"] - queue["ready"] - queue["in_flight"]
        assert held_back >= queue.get("delayed", 0) >= 0
        return queue["ready"], queue["in_flight"], queue["dead_lettered"]

    def delayed(self) -> int:
        """The number of jobs that wait for their time."""
        delayed: int = self.state()["queue"]["delayed"]
        return delayed

    def leases(self, **query: object) -> Json:
        """One page of the leases."""
        params = {key: str(value) for key, value in query.items()}
        return good(self.api.http.get(f"{self.path}/leases", params=params))

    def held(self) -> list[Json]:
        """Every lease, page after page."""
        page = self.leases(page_size=1000)
        leases: list[Json] = page["leases"]
        while "next_cursor" in page:
            page = self.leases(page_size=1000, cursor=page["next_cursor"])
            leases += page["leases"]
        return leases

    def work(self, node: str = "a", **query: object) -> SseStream:
        """Open a push stream; the caller closes it."""
        pairs = "".join(f"&{key}={value}" for key, value in query.items())
        return SseStream(self.api.url, f"{self.path}/work?node={node}{pairs}")

    def is_expired(self, count: int = 0) -> None:
        """Wait until at most `count` leases are left."""
        eventually(lambda: self.counts()[1] <= count, "the leases run out")


def seqs_of(jobs: Sequence[Json]) -> list[int]:
    """The seqs of claimed jobs."""
    return [job["$seq"] for job in jobs]


def tokens_of(jobs: Sequence[Json]) -> list[str]:
    """The lease ids of claimed jobs."""
    return [job["lease_id"] for job in jobs]


def datas_of(jobs: Sequence[Json]) -> list[Any]:
    """The payloads of claimed jobs."""
    return [job["data"] for job in jobs]


def now_ms() -> int:
    """The server's wall clock."""
    return time.time_ns() // 1_000_000


def within(call: Callable[[], Json]) -> tuple[Json, int, int]:
    """An answer with the wall clock just before and just after it."""
    before = now_ms()
    answer = call()
    return answer, before, now_ms()
