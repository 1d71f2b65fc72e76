"""The records with traces of a golden data directory, and the records derived from them.

Every stored form: a request's records and a router's copies in the journal, in snapshots and in
segments; dead letters and a redriven job; records of a stream; records with keys of their own.
"""

from __future__ import annotations

import json
from typing import Any, Final

from tests.contract.driver import Api, eventually, good

TRACED: Final = "traced"
COPIES: Final = "traced-copies"
JOBS: Final = "traced-jobs"
LETTERS: Final = "traced-dead"
ROUTER: Final = f"{TRACED}->{COPIES}"
STREAM: Final = "/v1/stream/traced-stream"
# How many records with a trace each topic of store-v19 has.
COUNTS: Final = {TRACED: 62, COPIES: 71, JOBS: 5, LETTERS: 1, "traced-stream": 51}


def trace(number: int) -> str:
    """A trace of its own for each number."""
    return f"00-{number + 1:032x}-{number + 1:016x}-01"


def add(api: Api, topic: str, number: int, records: list[dict[str, Any]], **fields: object) -> None:
    """Append with a trace, if the number is even."""
    body = json.dumps({"records": records, **fields})
    headers = {"content-type": "application/json"}
    if number % 2 == 0:
        headers["traceparent"] = trace(number)
    good(api.http.post(f"/v0/topics/{topic}", content=body, headers=headers))


def send(api: Api, method: str, number: int, body: bytes) -> None:
    """One request to the stream, with a trace."""
    headers = {"content-type": "application/x-bytes", "traceparent": trace(number)}
    assert api.http.request(method, STREAM, content=body, headers=headers).status_code < 300


def first_traces(api: Api, records: list[dict[str, Any]]) -> None:
    """Traces for segments and snapshots; `records`: a batch of each append."""
    good(api.put(TRACED, {"durability": "fsync"}))
    config = {"type": "queue", "durability": "fsync", "max_deliveries": 1, "dead_letter": LETTERS}
    good(api.put(JOBS, config))
    route = {"source": TRACED, "dest": COPIES, "guarantee": "exactly_once"}
    good(api.http.put(f"/v0/routers/{ROUTER}", json=route))
    for number in range(8):
        add(api, TRACED, number, records)
        add(api, JOBS, number, [{"data": number}])
        if number == 3:
            _die(api, 4)
    send(api, "PUT", 0, b"first")
    for number in range(1, 50):
        send(api, "POST", number, bytes([number]) * number)
    good(api.delete(TRACED, before_seq=10))


def last_traces(api: Api, records: list[dict[str, Any]]) -> None:
    """Traces in the journal's tail."""
    for number in range(8, 12):
        add(api, TRACED, number, records)
        add(api, JOBS, number, [{"data": number, "delay_ms": number}])
    add(api, TRACED, 12, records, idempotency_key="traced", idempotency="per_record")
    add(api, TRACED, 14, records[:1], config={"cap_records": 1000})
    send(api, "POST", 50, b"tail")
    seqs = [record["$seq"] for record in good(api.diff(LETTERS))["records"][:2]]
    done = good(api.http.post(f"/v0/topics/{JOBS}/redrive", json={"seqs": seqs}))
    assert done["redriven"] == 2


def _die(api: Api, count: int) -> None:
    """Make dead letters of all jobs."""
    claim = {"node": "w", "max": count, "lease_ms": 600_000}
    jobs = good(api.http.post(f"/v0/topics/{JOBS}/claim", json=claim))["claimed"]
    assert len(jobs) == count
    seqs = [job["$seq"] for job in jobs]
    good(api.http.post(f"/v0/topics/{JOBS}/nack", json={"node": "w", "seqs": seqs}))

    def are_dead() -> bool:
        assert good(api.http.post(f"/v0/topics/{JOBS}/claim", json=claim))["claimed"] == []
        return bool(good(api.state(JOBS))["queue"]["dead_lettered"] == count)

    eventually(are_dead, "they are dead letters")
