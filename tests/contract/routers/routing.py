"""Routers by their endpoints (§6), for the contract tests of routers.

Owns the paths and the usual bodies; checks that an answer is no error and returns it unchanged,
unless it says unchecked. Waits use the router's state. Used by `tests/contract/test_router*.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx

from tests.contract.driver import Api, Json, eventually, good

DEFINITION: Final = (
    *("router", "source", "dest", "preserve_node", "preserve_tag", "filter", "allow_cycle"),
    "guarantee",
)
DEFAULTS: Final[Json] = {
    "preserve_node": True,
    "preserve_tag": True,
    "filter": None,
    "allow_cycle": False,
    "guarantee": "at_least_once",
}
WITHIN_S: Final = 20.0


@dataclass(slots=True)
class Routing:
    """The routers of a server; `api` may be replaced after a restart."""

    api: Api

    def put(self, name: str, source: str, dest: str, **fields: object) -> httpx.Response:
        """PUT a router, unchecked; the name is escaped as clients do."""
        body = {"source": source, "dest": dest, **fields}
        return self.api.http.put(f"/v0/routers/{quote(name, safe='')}", json=body)

    def made(self, source: str, dest: str, name: str = "", **fields: object) -> str:
        """Create a router, with the usual name by default; return its name."""
        name = name or f"{source}->{dest}"
        answer = self.put(name, source, dest, **fields)
        assert good(answer)["created"] is True
        assert answer.status_code == 201
        return name

    def changed(self, name: str, source: str, dest: str, **fields: object) -> Json:
        """PUT an existing router; return the answer."""
        answer = self.put(name, source, dest, **fields)
        assert good(answer)["created"] is False
        assert answer.status_code == 200
        told: Json = answer.json()
        return told

    def read(self, name: str) -> httpx.Response:
        """GET a router, unchecked."""
        return self.api.http.get(f"/v0/routers/{quote(name, safe='')}")

    def get(self, name: str) -> Json:
        """The state of a router."""
        return good(self.read(name))

    def drop(self, name: str) -> Json:
        """DELETE a router; the answer."""
        return good(self.api.http.delete(f"/v0/routers/{quote(name, safe='')}"))

    def page(self, **query: object) -> Json:
        """One page of the list."""
        params = {key: str(value) for key, value in query.items()}
        return good(self.api.http.get("/v0/routers", params=params))

    def rows(self, **query: object) -> list[Json]:
        """Every row of the list, page after page."""
        page = self.page(**{"page_size": 1000, **query})
        rows: list[Json] = page["routers"]
        while "next_cursor" in page:
            page = self.page(**{"page_size": 1000, **query}, cursor=page["next_cursor"])
            rows += page["routers"]
        return rows

    def names(self, **query: object) -> list[str]:
        """The names of those rows."""
        return [row["router"] for row in self.rows(**query)]

    def settled(self, *names: str) -> None:
        """Wait until these routers, in the order of a chain, have examined all of their sources."""
        for name in names:
            eventually(lambda n=name: self._is_level(n), f"{name} is level", WITHIN_S)  # type: ignore[misc]

    def _is_level(self, name: str) -> bool:
        head: int = self.api.get_state(self.get(name)["source"])["head_seq"]
        cursor: int = self.get(name)["cursor_seq"]
        return cursor >= head

    def stalled(self, name: str) -> Json:
        """Wait until a router is stalled; return its state."""
        eventually(lambda: bool(self.get(name)["state"] == "stalled"), f"{name} stalls", WITHIN_S)
        return self.get(name)

    def datas(self, topic: str) -> list[Any]:
        """The records of a topic."""
        return datas_of(self.api.read_all(topic))


def datas_of(records: Sequence[Json]) -> list[Any]:
    """The payloads of records."""
    return [record["data"] for record in records]


def copied(records: Sequence[Json]) -> list[Json]:
    """Records without the fields that differ between a copy and its source."""
    return [{k: v for k, v in r.items() if k not in ("$seq", "$ts")} for r in records]
