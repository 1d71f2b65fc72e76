"""`BlockingClient`: one HTTP client and its patience; the base of the clients without a loop."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self, TypeVar

import httpx

from topics_server.client.calls import Call
from topics_server.client.effects import Effects
from topics_server.client.errors import ClientError
from topics_server.client.exchange import (
    JSON_BODY,
    answer_of,
    headers,
    is_worn,
    unreachable,
    verified,
)
from topics_server.client.retries import RetryPolicy

T = TypeVar("T")


class BlockingClient:
    """Sends calls to one server; with `shared` over the connections of that client.

    Threads may share one.
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
        self._is_owner = shared is None
        self._http: httpx.Client = (
            shared._http
            if shared is not None
            else httpx.Client(
                base_url=url,
                headers=headers(token),
                timeout=self._timeout_s,
                trust_env=False,
                verify=verified(url),
            )
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
        if self._is_owner:
            self._http.close()

    def _patiently(self, call: Call[T], patience_ms: int | None = None) -> T:
        """Send a call, and again within the patience if it is repeatable. Raises `ClientError`."""
        retries = RetryPolicy(self._retry_for_ms if patience_ms is None else patience_ms)
        while True:
            try:
                return self._once(call)
            except ClientError as error:
                pause_ms = retries.pause_ms(error, self._effects.chance())
                if pause_ms is None or not call.repeatable:
                    raise
            threading.Event().wait(pause_ms / 1000)

    def _once(self, call: Call[T]) -> T:
        """Send a call; a kept connection that the server had closed is replaced. Raises
        `ClientError`.
        """
        tries = 2 if call.repeatable else 1
        while True:
            tries -= 1
            try:
                response = self._http.request(
                    call.method,
                    call.path,
                    content=call.body,
                    headers=call.headers or (JSON_BODY if call.body is not None else None),
                    timeout=self._timeout_s + call.wait_ms / 1000,
                )
            except httpx.TransportError as error:
                if not (tries and is_worn(error)):
                    raise unreachable(error, self._url) from None
            else:
                return answer_of(response, call)
