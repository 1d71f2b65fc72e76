"""`ViewClient`: one view of one server, without an event loop.

The blocking twin of `async_view.AsyncViewClient`: the same calls, errors and patience. Threads may
share one.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import httpx
import httpx_sse

from topics_server.client.blocking_client import BlockingClient
from topics_server.client.effects import Effects
from topics_server.client.errors import BadAnswer, ClientError, Unreachable, refusal
from topics_server.client.exchange import (
    PATIENCE_MS,
    SILENCE_MS,
    TIMEOUT_MS,
    stream_error,
    unreachable,
)
from topics_server.client.viewing import view_calls
from topics_server.client.viewing.view_calls import Defined, Params, QueryResult, ViewProgress


class ViewClient(BlockingClient):
    """A view of a topic; the fields are `AsyncViewClient`'s."""

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
        shared: BlockingClient | None = None,
    ) -> None:
        self.place = view_calls.view_address(topic, view, url)
        super().__init__(self.place.url, token, timeout_ms, patience_ms, effects, shared)

    def define(
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
        return self._patiently(
            view_calls.define(
                self.place,
                schema=schema,
                apply=apply,
                queries=queries,
                shortcut=shortcut,
                on_delete=on_delete,
            )
        )

    def query(
        self,
        sql: str | None = None,
        params: Params = (),
        *,
        name: str | None = None,
        after: int | None = None,
    ) -> QueryResult:
        """Rows of a statement, or of the query `name` of the definition.

        With `after` they reflect that record and every record before it. Raises `Unavailable` with
        code `view_timeout` when the view does not get there within `patience_ms`.
        """
        return self._patiently(view_calls.query(self.place, sql, name, params, after))

    def stats(self) -> ViewProgress:
        """How far the view is, and why it stands still if it does."""
        return self._patiently(view_calls.progress(self.place))

    def rebuild(self, *, skip: int | None = None) -> ViewProgress:
        """Build the view anew; with `skip`, pass that record, at which it stands still."""
        return self._once(view_calls.rebuild(self.place, skip))

    def drop(self) -> bool:
        """Delete the view; whether it was there."""
        return self._patiently(view_calls.drop(self.place))

    def live(self, name: str, **params: str | int | float) -> Generator[QueryResult, None, None]:
        """The rows of a named query now, and again whenever they change.

        Ends only with an error: `Unreachable` when the stream breaks.
        """
        path = view_calls.live_path(self.place, name, params)
        timeout = httpx.Timeout(self._timeout_s, read=SILENCE_MS / 1000)
        last: ClientError = Unreachable("the server ended the stream", sent=True)
        try:
            with httpx_sse.connect_sse(self._http, "GET", path, timeout=timeout) as source:
                if source.response.status_code != 200:
                    retry_after = source.response.headers.get("Retry-After")
                    answer = source.response.read()
                    raise refusal(source.response.status_code, retry_after, answer)
                for event in source.iter_sse():
                    if event.event == "rows":
                        yield view_calls.read_rows(event.data.encode())
                    elif event.event == "error":
                        last = stream_error(event.data.encode(), last)
        except httpx_sse.SSEError as error:
            raise BadAnswer(str(error)) from None
        except httpx.TransportError as error:
            raise unreachable(error, self.place.url) from None
        raise last
