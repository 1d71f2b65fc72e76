"""A golden data directory: unpacking it, opening a node on the copy, reading everything back.

A vector is a folder `store-vN` with `store.tar.gz` (folders `data` and `cold`, as a killed server
left them) and `expected.json` (the expected answers). The opening call sets the boot and the time,
so that neither heads jump nor records expire between the making and the test. Called by
`make_store` and by `tests/storage/golden`.
"""

from __future__ import annotations

import asyncio
import contextlib
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from topics_server.api.application import build_app
from topics_server.node.boot import Boot
from topics_server.node.ground import Ground
from topics_server.node.node import Node
from topics_server.settings import Settings
from topics_server.wal.segments.packing_process import InlinePacker

VECTORS: Final = Path(__file__).resolve().parent
BOOT_ID: Final = "00000000-0000-4000-8000-000000000001"
NODE: Final = "node-a"
# The fields of a topic's state that depend on the data; the others depend on the reader and the
# time.
STATE_FIELDS: Final = (
    *("topic", "type", "head_seq", "earliest_seq", "next_seq", "count", "bytes"),
    *("damaged_records", "config", "last_write_ts"),
)
_PAGES_MAX: Final = 1_000
_TRIES_MAX = 50


class Expected(msgspec.Struct):
    """The content of `expected.json`. `topics`: by name, see `read_back`; `absent`: names with 404.

    `seen_ms`: when the answers were taken. `environment`: settings of the server that wrote it.
    `retries` and `deletes`: requests whose answers only the stored keys, tags and flags can give.
    `sessions`: by wid, the seq up to which each topic was sent. `queues`: by name, see
    `read_queue`; none in vectors from before there were leases. `routers`: by name, see
    `router_of`. `producers`: requests that are repeats or refused, and their answers. `streams`: by
    path, see `stream_part`. `views`: by topic and name, see `definition_of`. `consumers`: by topic,
    see `consumers_of`. `filters`, `prefixes` and `acks`: of the sessions that have them, by wid.
    `holds`: by topic, see `consumer_part.holds_of`.
    """

    note: str
    seen_ms: int
    environment: dict[str, str]
    topics: dict[str, Any]
    absent: list[str]
    retries: list[dict[str, Any]]
    deletes: list[dict[str, Any]]
    sessions: dict[str, dict[str, int]] = {}
    queues: dict[str, Any] = {}
    routers: dict[str, Any] = {}
    producers: list[dict[str, Any]] = []
    streams: dict[str, Any] = {}
    views: dict[str, Any] = {}
    consumers: dict[str, Any] = {}
    filters: dict[str, str] = {}
    prefixes: dict[str, list[str]] = {}
    acks: dict[str, dict[str, str]] = {}
    holds: dict[str, dict[str, Any]] = {}


def definition_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The stored part of a view's answer: its definition."""
    return {name: answer[name] for name in ("schema", "apply", "queries", "on_delete")}


def consumers_of(answer: dict[str, Any]) -> list[list[Any]]:
    """The stored part of a list of consumers: name, seq and times of each."""
    fields = ("consumer", "seq", "created_ts", "committed_ts")
    return [[each[field] for field in fields] for each in answer["consumers"]]


class _Page(msgspec.Struct):
    records: list[msgspec.Raw]
    next_from_seq: int
    caught_up: bool
    tombstone: dict[str, Any] | None


class StandingClock:
    """A clock that stays at the time of the vector's answers."""

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """See `engine.ports.Clock`."""
        return self._now_ms

    def monotonic_ms(self) -> float:
        """See `engine.ports.Clock`."""
        return 0.0


def unpack(vector: Path, target: Path) -> Expected:
    """Unpack the vector's folders into `target`; return the expected answers."""
    with tarfile.open(vector / "store.tar.gz") as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(target, filter="data")
        else:  # before Python 3.11.4, which Debian 12 does not have; the archive is ours
            archive.extractall(target)
    return msgspec.json.decode((vector / "expected.json").read_bytes(), type=Expected)


class PatientTransport(httpx.ASGITransport):
    """Repeats a request after a 429, as clients do, because a busy machine puts the node under
    pressure.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.ASGITransport`."""
        await request.aread()
        for _ in range(_TRIES_MAX):
            answer = await super().handle_async_request(request)
            if answer.status_code != 429:
                break
            await asyncio.sleep(0.2)
        return answer


@contextlib.asynccontextmanager
async def opened(
    folder: Path, expected: Expected, boot_id: str = BOOT_ID
) -> AsyncIterator[httpx.AsyncClient]:
    """A node on `folder/data` and `folder/cold`, called in-process; closed cleanly."""
    async with node_of(folder, expected, boot_id) as node:
        transport = PatientTransport(app=build_app(node.state), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http


@contextlib.asynccontextmanager
async def node_of(folder: Path, expected: Expected, boot_id: str = BOOT_ID) -> AsyncIterator[Node]:
    """A node on `folder/data` and `folder/cold`; closed cleanly."""
    names = {k.removeprefix("TOPICS_").lower(): v for k, v in expected.environment.items()}
    settings = Settings(
        **{**names, "data_dir": folder / "data", "cold_dir": folder / "cold"}  # type: ignore[arg-type]
    )
    clock = StandingClock(expected.seen_ms)
    boot = Boot(Ground.open(settings, 256, clock=clock, packer=InlinePacker(), boot_id=boot_id))
    try:
        yield await boot.start()
        boot.begin_drain()
    finally:
        await boot.close()


async def read_back(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """Everything in a topic's answers: state, every record byte for byte, tombstones in their
    places.
    """
    state = (await http.get(f"/v0/topics/{name}", params={"touch": "false"})).json()
    told: list[Any] = []
    from_seq = 0
    for _ in range(_PAGES_MAX):
        page = await _page(http, name, from_seq)
        if page.tombstone is not None:
            told.append(page.tombstone)
        told += [bytes(record).decode() for record in page.records]
        from_seq = page.next_from_seq
        if page.caught_up:
            break
    else:
        raise AssertionError(f"{name}: not caught up after {_PAGES_MAX} pages")
    filtered = await http.post(f"/v0/topics/{name}/diff", json={"node": NODE, "limit": 1000})
    assert filtered.status_code == 200, filtered.text
    return {
        "state": {field: state[field] for field in STATE_FIELDS},
        "told": told,
        "seqs_without_node": [record["$seq"] for record in filtered.json()["records"]],
    }


async def read_queue(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """A queue's own facts: how many jobs have each state, and every lease."""
    state = (await http.get(f"/v0/topics/{name}", params={"touch": "false"})).json()
    leases = (await http.get(f"/v0/topics/{name}/leases", params={"page_size": "1000"})).json()
    return {"queue": state["queue"], "leases": leases["leases"]}


def router_of(answer: httpx.Response) -> dict[str, Any]:
    """A router's definition and position."""
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return {key: value for key, value in told.items() if key not in ("performance", "reason")}


async def _page(http: httpx.AsyncClient, name: str, from_seq: int) -> _Page:
    body = {"from_seq": from_seq, "limit": 1000, "include_tags": True}
    answer = await http.post(f"/v0/topics/{name}/diff", json=body)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=_Page)
