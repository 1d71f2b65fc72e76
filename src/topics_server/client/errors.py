"""The client's errors, and reading an error response.

`Refused` and its kinds are the server's words; `Unreachable` is nobody's; `BadAnswer` is an answer
that is not a topics server's. `passes` tells which of them are worth another try. Raised by `queue`
and `blocking`, judged by the loops of `engine` and `settling`. Producers have kinds of their own:
`Undelivered` is what became of a record, with one of the others as its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec


class ClientError(Exception):
    """Everything this package raises on its own."""


class Unreachable(ClientError):
    """Nobody answered; `sent` tells whether the server may have seen the request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class BadAnswer(ClientError):
    """Something answered that does not speak as a topics server does."""


class Refused(ClientError):
    """The server said no: `status` of HTTP, `code` and `detail` of its envelope.

    `retry_after_ms` is how long it asked to wait, None if it did not.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        detail: Mapping[str, Any] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.status = status
        self.code = code
        self.detail = dict(detail or {})
        self.retry_after_ms = retry_after_ms


class InvalidRequest(Refused):
    """400, 413, 415: the request itself is wrong; `detail` names the field."""


class Unauthorized(Refused):
    """401, 403: the token is missing, unknown, or may not do this."""


class NotFound(Refused):
    """404: no such topic (`topic_not_found`), or no such call (`not_found`)."""


class NotAQueue(Refused):
    """409 `not_a_queue`: the topic is a plain log."""


class QueueFull(Refused):
    """422 `topic_full`: a queue with `discard: "reject"` has no room."""


class Throttled(Refused):
    """429: too much at once; `retry_after_ms` says when again."""


class Unavailable(Refused):
    """A status from 500 on: the server starts, stops or cannot write."""


class StreamClosed(Refused):
    """409 with `Stream-Closed`: nothing more can be appended."""


class Fenced(ClientError):
    """Another process writes as this producer; `epoch` is the one the server told."""

    def __init__(self, message: str, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch


class Forgotten(ClientError):
    """The server does not know what it acknowledged; it expects `expected_seq`."""

    def __init__(self, message: str, expected_seq: int) -> None:
        super().__init__(message)
        self.expected_seq = expected_seq


class InDoubt(ClientError):
    """A new epoch cannot be begun: what the last one stored cannot be known."""


class ProducerClosed(ClientError):
    """The producer was closed before this was acknowledged."""


class Forked(ClientError):
    """The producer was made before `fork`; its connections and its thread are the parent's."""


class Undelivered(ClientError):
    """A record that was not acknowledged, and never will be by this producer.

    `reason` is what went wrong, the cause too. `in_doubt`: the server may have the record all the
    same; if not, it has not.
    """

    def __init__(self, reason: ClientError, *, in_doubt: bool) -> None:
        super().__init__(f"{'may not be' if in_doubt else 'is not'} stored: {reason}")
        self.reason = reason
        self.in_doubt = in_doubt
        self.__cause__ = reason


_BY_STATUS: Final[Mapping[int, type[Refused]]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    413: InvalidRequest,
    415: InvalidRequest,
    422: InvalidRequest,
    429: Throttled,
}
_BY_CODE: Final[Mapping[str, type[Refused]]] = {"not_a_queue": NotAQueue, "topic_full": QueueFull}


class _Problem(msgspec.Struct):
    code: str
    message: str = ""
    detail: dict[str, Any] | None = None


class _Envelope(msgspec.Struct):
    error: _Problem


def refusal(status: int, retry_after: str | None, answer: bytes) -> Refused:
    """What an answer that is no success says; its body is an envelope, or not ours at all."""
    try:
        problem = msgspec.json.decode(answer, type=_Envelope).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = _Problem(f"http_{status}", "no answer of a topics server")
    kind = _BY_CODE.get(problem.code) or _BY_STATUS.get(status)
    if kind is None:
        kind = Unavailable if status >= 500 else Refused
    detail = problem.detail or {}
    wait_ms = detail.get("retry_after_ms")
    if not isinstance(wait_ms, int):
        is_number = retry_after is not None and retry_after.isascii() and retry_after.isdigit()
        wait_ms = int(retry_after or 0) * 1000 if is_number else None
    return kind(status, problem.code, problem.message, detail, wait_ms)


def passes(error: ClientError) -> bool:
    """Whether the same call may succeed later without anybody changing it."""
    return isinstance(error, Unreachable | Throttled | Unavailable)


def asked_wait_ms(error: ClientError) -> int:
    """How long the server asked to wait; 0 if it did not."""
    return (error.retry_after_ms or 0) if isinstance(error, Refused) else 0
