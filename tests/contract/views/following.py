"""Talks to views over HTTP: define, query, wait, compare with a fold in plain Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import httpx

from tests.contract.driver import Api, Json, good

COUNTS: Final[Json] = {"shortcut": {"count_by_tag": True}}
# Every record as a row, so that two states of a view can be compared to the byte.
ROWS: Final[Json] = {
    "schema": "CREATE TABLE rows (seq INTEGER PRIMARY KEY, tag, node, data, meta)",
    "apply": "INSERT INTO rows VALUES (:seq, :tag, :node, :data, :meta)",
    "queries": {"all": "SELECT seq, tag, data FROM rows ORDER BY seq"},
}
SETTLES_S: Final = 30.0


class Viewing:
    """The views of one topic."""

    def __init__(self, api: Api, topic: str) -> None:
        self.api = api
        self.topic = topic

    def url(self, view: str, verb: str = "") -> str:
        """The path of a view, or of something below it."""
        return f"/v0/topics/{self.topic}/views/{view}" + (f"/{verb}" if verb else "")

    def put(self, view: str, definition: Json) -> httpx.Response:
        """Define a view."""
        return self.api.http.put(self.url(view), json=definition)

    def made(self, view: str, definition: Json) -> str:
        """Define a view; must succeed. Its name."""
        good(self.put(view, definition))
        return view

    def query(self, view: str, after: int | None = None, **body: Any) -> httpx.Response:
        """POST a query with these members."""
        params = {} if after is None else {"after": str(after)}
        return self.api.http.post(self.url(view, "query"), json=body, params=params)

    def rows(self, view: str, sql: str = "", after: int | None = None, **params: Any) -> list[Any]:
        """The rows of a statement, or of the query `all`; must succeed."""
        body: Json = {"sql": sql, "params": params} if sql else {"query": "all"}
        return list(good(self.query(view, after, **body))["rows"])

    def stats(self, view: str) -> Json:
        """The stats of the view; the request must succeed."""
        return good(self.api.http.get(self.url(view, "stats")))

    def rebuild(self, view: str, **body: Any) -> httpx.Response:
        """POST a rebuild."""
        return self.api.http.post(self.url(view, "rebuild"), json=body)

    def until(self, view: str, is_met: Callable[[Json], bool]) -> Json:
        """Wait for stats for which `is_met` holds, and return them."""
        end = time.monotonic() + SETTLES_S
        while True:
            stats = self.stats(view)
            if is_met(stats):
                return stats
            assert time.monotonic() < end, stats
            time.sleep(0.02)

    def caught_up(self, view: str) -> Json:
        """Wait until the view has applied all records of the topic."""
        return self.until(view, lambda stats: stats["status"] == "ready" and stats["lag"] == 0)
