"""`AsyncQueue`: one queue of one server, for coroutines.

Owns the HTTP connection only: requests are in `calls`, errors in `errors`. Every method raises the
kinds of `errors`; `Unreachable` after `patience_ms` of failures.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx
import httpx_sse
import msgspec

from topics_server.client import calls
from topics_server.client.addresses import checked_token
from topics_server.client.calls import Call
from topics_server.client.effects import Effects, new_key
from topics_server.client.errors import (
    BadAnswer,
    ClientError,
    Unavailable,
    Unreachable,
    refusal,
)
from topics_server.client.retries import RetryPolicy
from topics_server.client.values import (
    Acked,
    Claimed,
    Enqueued,
    Extended,
    Job,
    Nacked,
    NewJob,
    QueueState,
)

T = TypeVar("T")
TIMEOUT_MS: Final = 30_000
PATIENCE_MS: Final = 10_000
# A stream sends something every 15 s; one that is silent for two of these intervals is dead.
SILENCE_MS: Final = 35_000
# Less than `sources.OPENING_MS`, to distinguish an absent server from a proxy that holds streams
# back.
CONNECT_MS: Final = 4000
JSON_BODY: Final = {"Content-Type": "application/json"}


class Advice(msgspec.Struct, frozen=True):
    """A frame of a stream that brings no job, but shows that the stream is alive."""


class _Trouble(msgspec.Struct):
    code: int
    error: str = ""
    retry_after_ms: int | None = None


_read_trouble: Final = calls.reader(_Trouble)


def headers(token: str | None) -> dict[str, str]:
    """The headers of every request. Raises `ValueError` for a token that no header can carry."""
    token = checked_token(token)
    # Ask for an uncompressed response: compression would buffer a stream's frames.
    found = {"Accept": "application/json", "Accept-Encoding": "identity"}
    return {**found, "Authorization": f"Bearer {token}"} if token else found


def verified(url: str) -> ssl.SSLContext | bool:
    """The trusted certificates: the machine's, or those of SSL_CERT_FILE.

    False for a URL without TLS; loading certificates takes tens of milliseconds.
    """
    return ssl.create_default_context() if url.startswith("https:") else False


def unreachable(error: httpx.TransportError, url: str) -> Unreachable:
    """The error of a broken connection."""
    sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    if isinstance(error, httpx.TimeoutException):
        what = "did not answer" if sent else "made no connection"
        return Unreachable(f"{url} {what} {_within(error)}", sent=sent)
    reason = re.sub(r"\[Errno -?[0-9]+\] ", "", str(error)) or type(error).__name__
    return Unreachable(f"{url}: {reason}", sent=sent)


def _within(error: httpx.TimeoutException) -> str:
    """The timeout that passed, in words."""
    phases = ((httpx.ConnectTimeout, "connect"), (httpx.WriteTimeout, "write"))
    name = next((name for kind, name in phases if isinstance(error, kind)), "read")
    try:
        seconds = error.request.extensions["timeout"][name]
    except (RuntimeError, KeyError, TypeError):
        seconds = None  # an error without a request, or a transport without timeouts
    return "in time" if seconds is None else f"within {seconds:g} s"


def is_worn(error: httpx.TransportError) -> bool:
    """Whether the server may have closed a kept connection meanwhile."""
    return not isinstance(error, httpx.TimeoutException | httpx.ConnectError)


def answer_of(response: httpx.Response, call: Call[T]) -> T:
    """The value of a 2xx response; raises the error of any other."""
    if not response.is_success:
        retry_after = response.headers.get("Retry-After")
        raise refusal(response.status_code, retry_after, response.content)
    return call.read(response.content)


def stream_error(payload: bytes, last: ClientError) -> ClientError:
    """The error of a stream's last frame; advice (429) does not end the stream."""
    trouble = _read_trouble(payload)
    if trouble.code == 429:
        return last
    # Opening the stream again returns the error with a status of its own.
    code = f"stream_{trouble.code}"
    return Unavailable(trouble.code, code, trouble.error, None, trouble.retry_after_ms)


class AsyncQueue:
    """A queue by name and `url`, or by its URL alone.

    `token`: the API key. `timeout_ms`: of one request. `patience_ms`: how long `enqueue` tries
    again when the server is away or throttles; 0 = once. `create`: whether `enqueue` makes a
    missing queue (default: the server's setting), `config`: its configuration.
    """

    def __init__(
        self,
        queue: str,
        *,
        url: str | None = None,
        token: str | None = None,
        timeout_ms: int = TIMEOUT_MS,
        patience_ms: int = PATIENCE_MS,
        create: bool | None = None,
        config: Mapping[str, Any] | None = None,
        effects: Effects | None = None,
    ) -> None:
        self.place = calls.place(queue, url)
        self._retry_for_ms = patience_ms
        self._create = create
        self._config = dict(config or {})
        self._effects = effects or Effects()
        self._timeout_s = timeout_ms / 1000
        self._http = httpx.AsyncClient(
            base_url=self.place.url,
            headers=headers(token),
            timeout=self._timeout_s,
            trust_env=False,
            verify=verified(self.place.url),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
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
        """Close the connections."""
        await self._http.aclose()

    # -- jobs in ---------------------------------------------------------------------------------

    async def enqueue(
        self,
        data: Any,
        *,
        tag: str | None = None,
        meta: dict[str, Any] | None = None,
        key: str | None = None,
        delay_ms: int | None = None,
        deliver_at_ms: int | None = None,
    ) -> Enqueued:
        """Store one job; `data` is anything msgspec encodes as JSON.

        `key` makes calls idempotent within the topic's window: a later call with the same key gets
        the first call's seq. Without a key, the tries of one call still store one job. `delay_ms`
        (from now) or `deliver_at_ms` (since 1970) hold the job back.

        Raises `QueueFull`, `InvalidRequest`, `NotFound`, `Unauthorized`; `Unreachable`, `Throttled`
        and `Unavailable` after `patience_ms` of failures.
        """
        job = NewJob(data=data, tag=tag, meta=meta, delay_ms=delay_ms, deliver_at_ms=deliver_at_ms)
        return await self.enqueue_many([job], key=key)

    async def enqueue_many(self, jobs: Iterable[NewJob], *, key: str | None = None) -> Enqueued:
        """Store jobs with consecutive seqs, all of them or none; errors as `enqueue`."""
        call = calls.enqueue(
            self.place, jobs, key=key or new_key(), create=self._create, config=self._config
        )
        retries = RetryPolicy(self._retry_for_ms)
        while True:
            try:
                return await self._do(call)
            except ClientError as error:
                pause_ms = retries.pause_ms(error, self._effects.chance())
                if pause_ms is None:
                    raise
            await self._effects.sleep_ms(pause_ms)

    # -- jobs out --------------------------------------------------------------------------------

    async def claim(
        self,
        node: str,
        *,
        max_jobs: int = 1,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        finished: Sequence[Job] = (),
    ) -> Claimed:
        """Lease up to `max_jobs` to `node` for `lease_ms` (default: the queue's setting).

        `wait_ms`: how long to wait for the first job. `finished`: jobs to ack with the same
        request, for a worker that loops; `Claimed.ack` is their result. Tried once: if the response
        is lost (`Unreachable` with `sent`), the claimed jobs come back when their lease ends, and
        finished jobs are acked or not.
        """
        return await self._do(
            calls.claim(
                self.place,
                node,
                max_jobs=max_jobs,
                lease_ms=lease_ms,
                wait_ms=wait_ms,
                finished=finished,
            )
        )

    async def ack(self, node: str, jobs: Sequence[Job]) -> Acked:
        """Delete finished jobs for good; jobs with an expired lease are `skipped`."""
        return await self._do(calls.ack(self.place, node, jobs))

    async def nack(
        self, node: str, jobs: Sequence[Job], *, delay_ms: int = 0, error: str | None = None
    ) -> Nacked:
        """Release jobs; they are claimable again after `delay_ms`.

        `error` says why they failed; a dead letter carries the last one.
        """
        return await self._do(calls.nack(self.place, node, jobs, delay_ms=delay_ms, error=error))

    async def extend(
        self,
        node: str,
        jobs: Sequence[Job],
        *,
        lease_ms: int,
        no_more: bool = False,
        timeout_ms: int | None = None,
    ) -> Extended:
        """Extend leases to `lease_ms` from now; `skipped` ones are lost.

        `no_more`: the streams of `work` that delivered them are to deliver nothing else.
        """
        call = calls.extend(self.place, node, jobs, lease_ms=lease_ms, no_more=no_more)
        return await self._do(call, timeout_ms=timeout_ms)

    async def state(self) -> QueueState:
        """Counters and configuration; raises `NotFound` and `NotAQueue`."""
        return await self._do(calls.state(self.place))

    async def work(
        self, node: str, *, max_jobs: int = 1, lease_ms: int | None = None
    ) -> AsyncGenerator[Job | Advice, None]:
        """Jobs as the server pushes them, at most `max_jobs` unacked.

        Ends only with an error: `Unreachable` when the stream breaks. At its end the server
        releases every lease that the stream delivered.
        """
        path = calls.work_path(self.place, node, max_jobs=max_jobs, lease_ms=lease_ms)
        connect_s = min(self._timeout_s, CONNECT_MS / 1000)
        timeout = httpx.Timeout(self._timeout_s, connect=connect_s, read=SILENCE_MS / 1000)
        last: ClientError = Unreachable("the server ended the stream", sent=True)
        try:
            async with httpx_sse.aconnect_sse(self._http, "GET", path, timeout=timeout) as source:
                if source.response.status_code != 200:
                    retry_after = source.response.headers.get("Retry-After")
                    answer = await source.response.aread()
                    raise refusal(source.response.status_code, retry_after, answer)
                async for event in source.aiter_sse():
                    if event.event == "job":
                        yield calls.pushed(self.place, event.data.encode())
                        continue
                    if event.event == "error":
                        last = stream_error(event.data.encode(), last)
                    yield Advice()
        except httpx_sse.SSEError as error:
            raise BadAnswer(str(error)) from None
        except httpx.TransportError as error:
            raise unreachable(error, self.place.url) from None
        raise last

    async def _do(self, call: Call[T], *, timeout_ms: int | None = None) -> T:
        tries = 2 if call.repeatable else 1
        timeout_s = self._timeout_s if timeout_ms is None else timeout_ms / 1000
        while True:
            tries -= 1
            try:
                response = await self._http.request(
                    call.method,
                    call.path,
                    content=call.body,
                    headers=JSON_BODY if call.body is not None else None,
                    timeout=timeout_s + call.wait_ms / 1000,
                )
            except httpx.TransportError as error:
                if not (tries and is_worn(error)):
                    raise unreachable(error, self.place.url) from None
            else:
                return answer_of(response, call)
