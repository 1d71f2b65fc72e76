"""Clients that decide under conditions while their server is killed, and the judge of them.

Three topics, each with its rule: a name belongs to one client (`names`), an account never falls
below zero (`transfers`: two records in one append), an event has so many seats (`seats`). A client
reads, decides, and appends its decision under the condition that none of the records that it read
has changed. It repeats a request without an answer under the same idempotency key. Nothing is
deleted, so the judge can replay every topic in the order of its seqs.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tests.contract.driver import Api, Json, Server

ACCOUNTS: Final = 40
OPENING: Final = 5
EVENTS: Final = 60
SEATS: Final = 4
WITHIN_S: Final = 60.0


@dataclass
class Attempt:
    """One conditional append: its request and its answer."""

    topic: str
    tags: list[str]
    after: int
    records: list[Json]
    answer: Json
    status: int


@dataclass
class Log:
    """A client's copy of a topic, read up to `head`."""

    head: int = 0
    by_tag: defaultdict[str, list[Json]] = field(default_factory=lambda: defaultdict(list))


class Deciders:
    """Many deciding clients; `attempts` are the attempts that got an answer."""

    def __init__(self, url: str, clients: int, rounds: int, seed: int) -> None:
        self.url = url
        self.attempts: list[Attempt] = []
        self._moved = asyncio.Event()
        self._clients = clients
        self._rounds = rounds
        self._seed = seed

    @property
    def done(self) -> int:
        """How many attempts have an answer."""
        return len(self.attempts)

    async def until(self, count: int) -> None:
        """Return when so many attempts have an answer."""
        while self.done < count:
            self._moved.clear()
            await self._moved.wait()

    async def run(self) -> None:
        """Run every client until the rounds are done."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        logs: defaultdict[str, Log] = defaultdict(Log)
        turn = 0
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=30) as http:
            while self.done < self._rounds:
                turn += 1
                topic = rng.choice(("names", "transfers", "seats"))
                log = logs[topic]
                await self._read(http, topic, log)
                # A decision about a name cannot rely on a read up to a seq: its condition covers
                # the whole topic.
                decided = _decide(rng, topic, log, f"{number}.{turn}")
                if decided is None:
                    continue
                tags, records = decided
                after = 0 if topic == "names" else log.head
                await self._append(http, Attempt(topic, tags, after, records, {}, 0))

    async def _read(self, http: httpx.AsyncClient, topic: str, log: Log) -> None:
        while True:
            body = {"from_seq": log.head, "limit": 1000, "include_tags": True}
            answer = await self._patiently(http, f"/v0/topics/{topic}/diff", body)
            page = answer.json()
            assert page["tombstone"] is None
            for record in page["records"]:
                log.by_tag[record["$tag"]].append(record)
            log.head = page["next_from_seq"]
            if page["caught_up"]:
                return

    async def _append(self, http: httpx.AsyncClient, attempt: Attempt) -> None:
        wanted = ["tag", "In", attempt.tags]
        body = {
            "records": attempt.records,
            "idempotency_key": attempt.records[0]["data"]["id"],
            "if": {"none_match": wanted, "after": attempt.after},
        }
        answer = await self._patiently(http, f"/v0/topics/{attempt.topic}", body)
        attempt.answer, attempt.status = answer.json(), answer.status_code
        assert attempt.status in (200, 409), answer.text
        self.attempts.append(attempt)
        self._moved.set()

    async def _patiently(self, http: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
        """Send the request again after each kill until it has an answer."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                try:
                    answer = await http.post(path, json=body)
                    if answer.status_code not in (429, 503):
                        return answer
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)


def _decide(
    rng: random.Random, topic: str, log: Log, number: str
) -> tuple[list[str], list[Json]] | None:
    """The record to append, and the tags that decided it; None: no append is possible."""
    if topic == "names":
        # About half of these names are taken, however long the run is.
        taken = len(log.by_tag)
        name = f"name:{max(0, taken - 24) + rng.randrange(48)}"
        return [name], [_record(name, number)]
    if topic == "seats":
        event = f"event:{rng.randrange(EVENTS)}"
        if len(log.by_tag[event]) >= SEATS:
            return None
        return [event], [_record(event, number)]
    giver, taker = (f"account:{each}" for each in rng.sample(range(ACCOUNTS), 2))
    balance = OPENING + sum(record["data"]["change"] for record in log.by_tag[giver])
    if balance < 1:
        return None
    amount = rng.randint(1, balance)
    changes = ((giver, -amount), (taker, amount))
    return [giver, taker], [_record(tag, number, change=change) for tag, change in changes]


def _record(tag: str, number: str, **data: Any) -> Json:
    return {"tag": tag, "data": {"id": number, **data}}


def prepare(api: Api) -> None:
    """Make the topics."""
    for topic in ("names", "transfers", "seats"):
        assert api.put(topic).status_code == 201


def judge(server: Server, deciders: Deciders) -> tuple[int, int]:
    """Replay every topic and judge every answer; returns how many were accepted and refused."""
    accepted = refused = 0
    for topic in ("names", "transfers", "seats"):
        records = server.api.read_all(topic, include_tags=True)
        by_seq = {record["$seq"]: record for record in records}
        assert list(by_seq) == list(range(1, len(by_seq) + 1)), f"{topic} has a gap"
        _replay(topic, records)
        answered: set[int] = set()
        for attempt in (each for each in deciders.attempts if each.topic == topic):
            if attempt.status == 409:
                refused += 1
                _check_refusal(attempt, by_seq)
            else:
                accepted += 1
                answered |= _check_acceptance(attempt, by_seq)
        assert answered == set(by_seq), f"{topic} has records of no accepted attempt"
    return accepted, refused


def _check_refusal(attempt: Attempt, by_seq: dict[int, Json]) -> None:
    error = attempt.answer["error"]
    assert error["code"] == "condition_failed", error
    seq = error["detail"]["seq"]
    assert seq > attempt.after
    assert by_seq[seq]["$tag"] in attempt.tags, f"{seq} does not conflict with {attempt}"


def _check_acceptance(attempt: Attempt, by_seq: dict[int, Json]) -> set[int]:
    assert attempt.answer["condition"] == "met"
    first, last = attempt.answer["first_seq"], attempt.answer["last_seq"]
    stored = [by_seq[seq] for seq in range(first, last + 1)]
    assert [{"tag": each["$tag"], "data": each["data"]} for each in stored] == attempt.records
    for seq in range(attempt.after + 1, first):
        assert by_seq[seq]["$tag"] not in attempt.tags, f"{seq} conflicts with {attempt}"
    return set(range(first, last + 1))


def _replay(topic: str, records: list[Json]) -> None:
    """Check that the rule of a topic holds at every seq."""
    if topic == "transfers":
        balances = Counter({f"account:{number}": OPENING for number in range(ACCOUNTS)})
        for record in records:
            balances[record["$tag"]] += record["data"]["change"]
            assert balances[record["$tag"]] >= 0, f"overdrawn by {record}"
        assert sum(balances.values()) == ACCOUNTS * OPENING
        return
    most = 1 if topic == "names" else SEATS
    for tag, count in Counter(record["$tag"] for record in records).items():
        assert count <= most, f"{tag} was given {count} times"
