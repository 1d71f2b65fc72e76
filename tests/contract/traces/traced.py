"""Appends with traces, for the tests of this folder."""

from __future__ import annotations

import json
from typing import Final

import httpx

from tests.contract.driver import Api, Json, good

TRACE: Final = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
# Bodies above this size are decoded off the loop.
LARGE_BYTES: Final = 300_000


def send(
    api: Api, topic: str, records: list[Json], trace: str | None = TRACE, **fields: object
) -> httpx.Response:
    """Append these records with this trace."""
    headers = {} if trace is None else {"traceparent": trace}
    body = {"records": records, **fields}
    return api.http.post(f"/v0/topics/{topic}", json=body, headers=headers)


def add(
    api: Api, topic: str, records: list[Json], trace: str | None = TRACE, **fields: object
) -> Json:
    """`send`, which must succeed."""
    return good(send(api, topic, records, trace, **fields))


def large_text(size: int = LARGE_BYTES) -> str:
    """A text of this size."""
    return "x" * size


def traces_of(records: list[Json]) -> list[str | None]:
    """The trace of each record."""
    return [record.get("$trace") for record in records]


def kept(api: Api, topic: str) -> list[tuple[object, object, object]]:
    """Data, meta and trace of each record."""
    return [
        (json.dumps(record["data"]), record.get("meta"), record.get("$trace"))
        for record in api.read_all(topic)
    ]
