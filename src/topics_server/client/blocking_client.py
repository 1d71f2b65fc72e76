"""`BlockingClient`: one HTTP client with retries; the base of the clients without a loop."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self, TypeVar

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


class BlockingClient:
    """Sends calls to one server; with `shared`, over the connections of that client.

    Threads may share one object.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_ms: int,
        patience_ms: int,
        effects: Effects | None,
        shared: BlockingClient | None = None,
    ) -> None:
        self._url = url
        self._retry_for_ms = patience_ms
        self._effects = effects or Effects()
        self._timeout_s = timeout_ms / 1000
        self._token = token
        self._shared = shared
        # The connections by process: a child of `fork` must not write on its parent's connections.
        # The child never closes them, because closing could need a lock that the parent held.
        self._of_process: dict[int, httpx.Client] = {}
        if shared is None:
            self._of_process[process_id()] = self._connections()

    @property
    def _http(self) -> httpx.Client:
        """The connections of this process."""
        if self._shared is not None:
            return self._shared._http
        process = process_id()
        found = self._of_process.get(process)
        if found is None:
            found = self._of_process.setdefault(process, self._connections())
        return found

    def _connections(self) -> httpx.Client:
        return httpx.Client(
            base_url=self._url,
            headers=headers(self._token),
            timeout=self._timeout_s,
            trust_env=False,
            verify=verified(self._url),
            limits=LIMITS,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, unless they are those of another client."""
        own = self._of_process.get(process_id())
        if own is not None:
            own.close()

    def _patiently(self, call: Call[T], patience_ms: int | None = None) -> T:
        """Send a call; retry a repeatable one until its retry time ends. Raises `ClientError`."""
        retries = RetryPolicy(self._retry_for_ms if patience_ms is None else patience_ms)
        may_be_done = False
        while True:
            try:
                return self._once(call, may_be_done=may_be_done)
            except ClientError as error:
                may_be_done = may_be_done or (isinstance(error, Unreachable) and error.sent)
                pause_ms = retries.pause_ms(error, self._effects.chance())
                if pause_ms is None or not call.repeatable:
                    raise
            threading.Event().wait(pause_ms / 1000)

    def _once(self, call: Call[T], *, may_be_done: bool = False) -> T:
        """Send a call, on a new connection if the server had closed the kept one.

        Raises `ClientError`. `may_be_done`: the server may have executed an earlier try.
        """
        response, is_repeat = self._response(call, self._timeout_s + call.wait_ms / 1000)
        return answer_of(response, call, may_be_done=may_be_done or is_repeat)

    def _response(
        self, call: Call[Any], timeout: float | httpx.Timeout
    ) -> tuple[httpx.Response, bool]:
        """The answer to a call, with any status, and whether the call was sent a second time."""
        tries = 2 if call.repeatable else 1
        while True:
            tries -= 1
            try:
                response = self._http.request(
                    call.method,
                    call.path,
                    content=call.body,
                    headers=call.headers or (JSON_BODY if call.body is not None else None),
                    timeout=timeout,
                )
            except httpx.RequestError as error:
                if not (tries and is_worn(error)):
                    raise failure(error, self._url) from None
            else:
                return response, call.repeatable and not tries
