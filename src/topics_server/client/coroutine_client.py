"""`CoroutineClient`: one HTTP client with retries; the base of the clients for coroutines.

The twin of `blocking_client.BlockingClient`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypeVar

import httpx

from topics_server.client.calls import Call
from topics_server.client.effects import Effects, process_id
from topics_server.client.errors import ClientError, Unreachable
from topics_server.client.exchange import (
    JSON_BODY,
    LIMITS,
    answer_of,
    failure,
    headers,
    is_worn,
    verified,
)
from topics_server.client.retries import RetryPolicy

T = TypeVar("T")


class CoroutineClient:
    """Sends calls to one server; with `shared`, over the connections of that client."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_ms: int,
        patience_ms: int,
        effects: Effects | None,
        shared: CoroutineClient | None = None,
    ) -> None:
        self._url = url
        self._retry_for_ms = patience_ms
        self._effects = effects or Effects()
        self._timeout_s = timeout_ms / 1000
        self._token = token
        self._shared = shared
        # The connections by process: a child of `fork` must not write on its parent's connections.
        # The child never closes them, because closing could need a lock that the parent held.
        self._of_process: dict[int, httpx.AsyncClient] = {}
        if shared is None:
            self._of_process[process_id()] = self._connections()

    @property
    def _http(self) -> httpx.AsyncClient:
        """The connections of this process."""
        if self._shared is not None:
            return self._shared._http
        process = process_id()
        found = self._of_process.get(process)
        if found is None:
            found = self._of_process.setdefault(process, self._connections())
        return found

    def _connections(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self._url,
            headers=headers(self._token),
            timeout=self._timeout_s,
            trust_env=False,
            verify=verified(self._url),
            limits=LIMITS,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, unless they are those of another client."""
        own = self._of_process.get(process_id())
        if own is not None:
            await own.aclose()

    async def _patiently(self, call: Call[T], patience_ms: int | None = None) -> T:
        """Send a call; retry a repeatable one until its retry time ends. Raises `ClientError`."""
        retries = RetryPolicy(self._retry_for_ms if patience_ms is None else patience_ms)
        may_be_done = False
        while True:
            try:
                return await self._once(call, may_be_done=may_be_done)
            except ClientError as error:
                may_be_done = may_be_done or (isinstance(error, Unreachable) and error.sent)
                pause_ms = retries.pause_ms(error, self._effects.chance())
                if pause_ms is None or not call.repeatable:
                    raise
            await self._effects.sleep_ms(pause_ms)

    async def _once(
        self, call: Call[T], *, timeout_ms: int | None = None, may_be_done: bool = False
    ) -> T:
        """Send a call, on a new connection if the server had closed the kept one.

        Raises `ClientError`. `may_be_done`: the server may have executed an earlier try.
        """
        tries = 2 if call.repeatable else 1
        timeout_s = self._timeout_s if timeout_ms is None else timeout_ms / 1000
        while True:
            tries -= 1
            try:
                response = await self._http.request(
                    call.method,
                    call.path,
                    content=call.body,
                    headers=call.headers or (JSON_BODY if call.body is not None else None),
                    timeout=timeout_s + call.wait_ms / 1000,
                )
            except httpx.RequestError as error:
                if not (tries and is_worn(error)):
                    raise failure(error, self._url) from None
                may_be_done = True
            else:
                return answer_of(response, call, may_be_done=may_be_done)
