"""`AsyncViewClient`: one view of one server, for coroutines.

Requests are in `view_calls`, errors in `errors`. A query is tried again for `patience_ms` if its
view does not process `after` in time, and so is any call if the server is away.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import httpx

from topics_server.client.coroutine_client import CoroutineClient
from topics_server.client.effects import Effects
from topics_server.client.event_frames import frames_async, reopened_async
from topics_server.client.exchange import (
    LIVE_RETRY_MS,
    PATIENCE_MS,
    SILENCE_MS,
    TIMEOUT_MS,
)
from topics_server.client.viewing import view_calls
from topics_server.client.viewing.view_calls import Defined, Params, QueryResult, ViewProgress


class AsyncViewClient(CoroutineClient):
    """A view of a topic.

    The fields are those of `AsyncQueue`; `patience_ms` applies to all calls except `rebuild`.
    """

    def __init__(
        self,
        topic: str,
        view: str,
        *,
        url: str | None = None,
        token: str | None = None,
        timeout_ms: int = TIMEOUT_MS,
        patience_ms: int = PATIENCE_MS,
        effects: Effects | None = None,
        shared: CoroutineClient | None = None,
    ) -> None:
        self.place = view_calls.view_address(topic, view, url)
        super().__init__(self.place.url, token, timeout_ms, patience_ms, effects, shared)

    async def aclose(self) -> None:
        """Close the connections; the same as `close`."""
        await self.close()

    async def define(
        self,
        *,
        schema: str | Sequence[str] | None = None,
        apply: str | Sequence[str] | None = None,
        queries: Mapping[str, str] | None = None,
        shortcut: Mapping[str, Any] | None = None,
        on_delete: str | None = None,
    ) -> Defined:
        """Define the view, or change its definition: SQL, or a shortcut.

        Raises `InvalidRequest` for SQL that is wrong or not allowed.
        """
        return await self._patiently(
            view_calls.define(
                self.place,
                schema=schema,
                apply=apply,
                queries=queries,
                shortcut=shortcut,
                on_delete=on_delete,
            )
        )

    async def query(
        self,
        sql: str | None = None,
        params: Params = (),
        *,
        name: str | None = None,
        after: int | None = None,
    ) -> QueryResult:
        """Rows of a statement, or of the query `name` of the definition.

        With `after`, they reflect that record and every record before it. Raises `Unavailable` with
        code `view_timeout` if the view does not process that record within `patience_ms`.
        """
        return await self._patiently(view_calls.query(self.place, sql, name, params, after))

    async def stats(self) -> ViewProgress:
        """The progress of the view, and the reason if it stopped."""
        return await self._patiently(view_calls.progress(self.place))

    async def rebuild(self, *, skip: int | None = None) -> ViewProgress:
        """Build the view anew; with `skip`, skip that record, at which the view stopped."""
        return await self._once(view_calls.rebuild(self.place, skip))

    async def drop(self) -> bool:
        """Delete the view; returns whether it existed."""
        return await self._patiently(view_calls.drop(self.place))

    async def live(
        self, name: str, **params: str | int | float
    ) -> AsyncGenerator[QueryResult, None]:
        """The rows of a named query now, and again whenever they change.

        A connection that breaks is made again. Ends only with an error: a refusal, or `Unreachable`
        once the server is away for an hour.
        """
        path = view_calls.live_path(self.place, name, params)
        shown: QueryResult | None = None
        found = reopened_async(lambda: self._rows(path), LIVE_RETRY_MS, self._effects)
        async with contextlib.aclosing(found) as results:
            async for result in results:
                # A new connection begins with all rows, which may equal the last rows of the old
                # connection.
                if shown is None or (shown.columns, shown.rows) != (result.columns, result.rows):
                    shown = result
                    yield result

    async def _rows(self, path: str) -> AsyncGenerator[QueryResult, None]:
        timeout = httpx.Timeout(self._timeout_s, read=SILENCE_MS / 1000)
        found = frames_async(self._http, self.place.url, path, timeout)
        async with contextlib.aclosing(found) as opened:
            async for frame in opened:
                if frame.event == "rows":
                    yield view_calls.read_rows(frame.data.encode())
