"""The client's errors, and reading an error response.

`Refused` and its kinds carry the server's error; `Unreachable` means that no response came;
`BadAnswer` is a response that does not come from a topics server. `passes` decides which errors are
worth another try. `queue` and `blocking` raise the errors; the loops of `worker_run` and
`acknowledge` handle them. Producers have errors of their own: `Undelivered` is the result of a
record, with one of the other errors as its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec


class ClientError(Exception):
    """Base of all errors of this package."""


class Unreachable(ClientError):
    """No response came; `sent`: the server may have received the request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class BadAnswer(ClientError):
    """A response that does not come from a topics server."""


class Refused(ClientError):
    """The server refused: HTTP `status`, and the envelope's `code`, `message` and `detail`.

    `retry_after_ms` is the pause that the server asked for, or None.
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
        self.message = message
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


class ConditionFailed(Refused):
    """409 `condition_failed`, 412 `precondition_failed`: another write came first; see `detail`."""


class Throttled(Refused):
    """429: too many requests or jobs; `retry_after_ms` is the pause before the next try."""


class Unavailable(Refused):
    """A status from 500 on: the server is starting or stopping, or cannot write."""


class StreamClosed(Refused):
    """409 with `Stream-Closed`: nothing more can be appended."""


class Fenced(ClientError):
    """Another process writes as this producer; `epoch` is the server's current epoch."""

    def __init__(self, message: str, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch


class Forgotten(ClientError):
    """The server has lost acknowledged requests; it expects `expected_seq`."""

    def __init__(self, message: str, expected_seq: int) -> None:
        super().__init__(message)
        self.expected_seq = expected_seq


class InDoubt(ClientError):
    """A new epoch cannot begin: it is unknown which records of the last epoch are stored."""


class ProducerClosed(ClientError):
    """The producer was closed before this record was acknowledged."""


class Forked(ClientError):
    """The producer was made before `fork`: its connections and its thread belong to the parent."""


class Undelivered(ClientError):
    """A record that was not acknowledged, and never will be by this producer.

    `reason`: the error, also the exception's cause. `in_doubt`: the server may have stored the
    record; if False, it has not.
    """

    def __init__(self, reason: ClientError, *, in_doubt: bool) -> None:
        super().__init__(f"{'may not be' if in_doubt else 'is not'} stored: {reason}")
        self.reason = reason
        self.in_doubt = in_doubt
        self.__cause__ = reason


# The longest pause that a server can ask for, so that a wrong header cannot stop a client for good.
RETRY_AFTER_MS_MAX: Final = 3_600_000
_SECONDS_CHARS_MAX: Final = 12
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
_BY_CODE: Final[Mapping[str, type[Refused]]] = {
    "not_a_queue": NotAQueue,
    "topic_full": QueueFull,
    "condition_failed": ConditionFailed,
    "precondition_failed": ConditionFailed,
}


class _Problem(msgspec.Struct):
    code: str
    message: str = ""
    detail: dict[str, Any] | None = None


class _Envelope(msgspec.Struct):
    error: _Problem


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)


def refusal(status: int, retry_after: str | None, answer: bytes) -> Refused:
    """The error of a response without success.

    Its body is an envelope, or comes from another server. A pause that the server asks for is
    limited to an hour.
    """
    try:
        problem = _ENVELOPE.decode(answer).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        problem = _Problem(f"http_{status}", "the answer is not from a topics server")
    kind = _BY_CODE.get(problem.code) or _BY_STATUS.get(status)
    if kind is None:
        kind = Unavailable if status >= 500 else Refused
    detail = problem.detail or {}
    wait_ms = detail.get("retry_after_ms")
    if not isinstance(wait_ms, int):
        seconds = _seconds(retry_after or "")
        wait_ms = None if seconds is None else seconds * 1000
    if wait_ms is not None:
        wait_ms = min(max(wait_ms, 0), RETRY_AFTER_MS_MAX)
    return kind(status, problem.code, problem.message, detail, wait_ms)


def _seconds(retry_after: str) -> int | None:
    """The number in a `Retry-After`; None for a date or any other value."""
    if not (retry_after.isascii() and retry_after.isdigit()):
        return None
    return int(retry_after[:_SECONDS_CHARS_MAX])


def passes(error: ClientError) -> bool:
    """Whether the same call may succeed later without any change to it.

    408 passes, too: the request arrived too slowly, for example because this machine was busy.
    """
    is_late = isinstance(error, Refused) and error.status == 408
    return is_late or isinstance(error, Unreachable | Throttled | Unavailable)


def asked_wait_ms(error: ClientError) -> int:
    """The pause that the server asked for; 0 without one."""
    return (error.retry_after_ms or 0) if isinstance(error, Refused) else 0
