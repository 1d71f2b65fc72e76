"""The connection of verbs that call a server: the client's transport, with the errors of verbs.

Owns `--url`/`--token` and the errors: `CallRefused` (the server refused: exit code 1, shown as
`code: message`) and `ServerUnreachable` (no server answered: exit code 2). `client` makes the
requests and connections, and interprets answers. Blocking. The token is sent but never shown.
"""

from __future__ import annotations

import functools
import http.client
import re
from collections.abc import Callable, Mapping
from typing import IO, Any, Final, ParamSpec, TypeVar

import click
import httpx
import msgspec

from topics_server.client import errors
from topics_server.client.addresses import checked_path, checked_token, checked_url, segment
from topics_server.client.blocking_client import BlockingClient
from topics_server.client.calls import Call
from topics_server.client.effects import process_id
from topics_server.client.errors import ClientError, Refused, Unreachable

TIMEOUT_S: Final = 60.0
# A reachable server accepts a connection at once, so a short timeout is enough.
CONNECT_S: Final = 5.0
DEFAULT_URL: Final = "http://127.0.0.1:4000"
P = ParamSpec("P")
R = TypeVar("R")


class Failure(click.ClickException):
    """A refusal or a mismatch: one line on standard error, exit code 1."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line without a prefix."""
        click.echo(self.message, err=True)


class CallRefused(Failure):
    """The server answered with an error; `status`, `code` and `retry_after_s` are its fields.

    `most_records`: the most records that the server accepts in one request, if this request had
    more. `cause`: the client's error.
    """

    def __init__(self, cause: Refused) -> None:
        code, message, detail = cause.code, cause.message, cause.detail
        if code == f"http_{cause.status}":
            message = http.client.responses.get(cause.status, message)
        field = detail.get("field")
        if isinstance(field, str) and field not in message:
            message = f"{message} ({field})"
        super().__init__(f"{code}: {message}")
        most, wait_ms = detail.get("max_batch_records"), cause.retry_after_ms
        self.most_records = most if isinstance(most, int) and most > 0 else None
        self.status = cause.status
        self.code = code
        self.retry_after_s = None if wait_ms is None else wait_ms / 1000
        self.cause = cause


class ServerUnreachable(Failure):
    """The connection failed or broke; `sent`: the server may have received the request."""

    exit_code = 2

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent
        self.cause = Unreachable(message, sent=sent)


class Answer(msgspec.Struct, frozen=True):
    """A complete answer with any status. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def refusal(self) -> CallRefused:
        """The error that the answer reports, or None for a success."""
        return refusal(self.status, self.headers.get("retry-after"), self.body)


class ServerConnection(BlockingClient):
    """Sends requests to one server."""

    def __init__(self, url: str, token: str | None = None) -> None:
        try:
            checked_url(url, DEFAULT_URL)
            self.token: Final = checked_token(token)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        self.url = url.rstrip("/")
        super().__init__(self.url, self.token, int(TIMEOUT_S * 1000), 0, None)

    @property
    def authorization(self) -> dict[str, str]:
        """The header with the token, for connections outside this class (streams)."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        repeatable: bool = False,
    ) -> bytes:
        """Return the body of a 2xx answer. Raises `CallRefused` or `ServerUnreachable`.

        The server may have closed a kept connection meanwhile; a `repeatable` request is then sent
        once more on a new one.
        """
        answer = self._answer(method, path, body, None, timeout_s, repeatable=repeatable)
        if answer.status >= 300:
            raise answer.refusal
        return answer.body

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        more: Mapping[str, bytes] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """Send one request with `more` headers; never repeats it. Raises `ServerUnreachable`."""
        return self._answer(method, path, body, more, timeout_s, repeatable=False)

    def _answer(
        self,
        method: str,
        path: str,
        body: bytes | None,
        more: Mapping[str, bytes] | None,
        timeout_s: float,
        *,
        repeatable: bool,
    ) -> Answer:
        headers = {name.encode(): value for name, value in (more or {}).items()}
        if body is not None:
            headers[b"Content-Type"] = b"application/json"
        try:
            call = Call(
                method=method,
                path=checked_path(path),
                body=body,
                read=bytes,
                repeatable=repeatable,
                headers=headers,
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S))
        try:
            found, _ = self._response(call, timeout)
        except ClientError as error:
            raise verb_error(error) from None
        return Answer(found.status_code, dict(found.headers), found.content)

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        own = self._of_process.pop(process_id(), None)
        if own is not None:
            own.close()


def verb_error(error: ClientError) -> CallRefused | ServerUnreachable:
    """Turn an error of the client into an error of a verb."""
    if isinstance(error, Refused):
        return CallRefused(error)
    if isinstance(error, Unreachable):
        return ServerUnreachable(str(error), sent=error.sent)
    return refused(200, "bad_answer", str(error))


def refused(status: int, code: str, message: str) -> CallRefused:
    """A refusal with a message of the verb's own."""
    return CallRefused(Refused(status, code, message))


def refusal(status: int, retry_after: str | None, answer: bytes) -> CallRefused:
    """The error in an answer without success."""
    return CallRefused(errors.refusal(status, retry_after, answer))


def reason_of(error: Exception) -> str:
    """The text of a connection error, without the system's error number."""
    return re.sub(r"\[Errno -?[0-9]+\] ", "", str(error)) or type(error).__name__


def wrong_text(error: Exception) -> str:
    """Explain in words why a text is not JSON, for exceptions of `msgspec` and of decoding."""
    match error:
        case UnicodeDecodeError(start=start):
            return f"byte {start} is not UTF-8"
        case UnicodeEncodeError():
            return "it is not UTF-8"
        case RecursionError():
            return "it is nested too deeply"
        case _:
            return str(error)


def topic_path(topic: str, rest: str = "") -> str:
    """The path of a topic; the name is escaped, so that it stays in its segment."""
    if not topic:
        raise click.UsageError("a topic's name must not be empty")
    return f"/v0/topics/{name_in_path(topic)}{rest}"


def router_path(router: str) -> str:
    """The path of a router, escaped in the same way."""
    if not router:
        raise click.UsageError("a router's name must not be empty")
    return f"/v0/routers/{name_in_path(router)}"


def name_in_path(name: str) -> str:
    """A name as one segment of a path."""
    try:
        return segment(name)
    except UnicodeEncodeError:
        raise  # `main` reports it, as for all verbs
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def server_options(verb: Callable[P, R]) -> Callable[..., R]:
    """Add `--url` and `--token`; the verb gets a `client`."""

    @click.option(
        "--url",
        envvar="TOPICS_URL",
        default=DEFAULT_URL,
        show_default=True,
        metavar="URL",
        help="Server to talk to.  [env: TOPICS_URL]",
    )
    @click.option(
        "--token",
        envvar="TOPICS_TOKEN",
        metavar="KEY",
        help="Key to send; safer in the environment.  [env: TOPICS_TOKEN]",
    )
    @functools.wraps(verb)
    def with_client(*args: Any, url: str, token: str | None, **kwargs: Any) -> R:
        client = ServerConnection(url, token)
        try:
            return verb(*args, client=client, **kwargs)  # type: ignore[arg-type]
        finally:
            client.close()

    return with_client
