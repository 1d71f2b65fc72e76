"""The HTTP connection of verbs that call a server.

Owns `--url`/`--token`, requests over a kept-alive connection, and the errors: `CallRefused` (the
server refused: exit code 1, shown as `code: message`) and `ServerUnreachable` (no server answered:
exit code 2). Blocking; one request at a time. The token is sent and never shown.
"""

from __future__ import annotations

import functools
import http.client
import re
import ssl
from collections.abc import Callable, Mapping
from typing import IO, Any, Final, ParamSpec, TypeVar
from urllib.parse import quote

import click
import msgspec

from topics_server.client.addresses import checked_token, checked_url

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

    `most_records`: how many records the server accepts in one request, if the request had more.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        retry_after_s: float | None,
        most_records: int | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.most_records = most_records
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class ServerUnreachable(Failure):
    """The connection failed or broke; `sent` tells whether the server may have received the
    request.
    """

    exit_code = 2

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Answer(msgspec.Struct, frozen=True):
    """A complete answer of any status; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def refusal(self) -> CallRefused:
        """The error that the answer reports, or None for a success."""
        return refusal(self.status, self.headers.get("retry-after"), self.body)


class _Problem(msgspec.Struct):
    code: str
    message: str = ""
    detail: dict[str, Any] | None = None


class _Envelope(msgspec.Struct):
    error: _Problem


class ServerConnection:
    """Sends requests to one server."""

    def __init__(self, url: str, token: str | None = None) -> None:
        try:
            parts = checked_url(url, DEFAULT_URL)
            self.token: Final = checked_token(token)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        assert parts.hostname is not None
        self.url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/")
        self._connection: http.client.HTTPConnection | None = None

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
        reused = self._connection is not None
        try:
            answer = self.ask(method, path, body, timeout_s=timeout_s)
        except ServerUnreachable:
            if not (reused and repeatable):
                raise
            answer = self.ask(method, path, body, timeout_s=timeout_s)
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
        """Send one request with `more` headers, once. Raises `ServerUnreachable`."""
        headers: dict[str, str | bytes] = {"Accept": "application/json", **self.authorization}
        headers |= more or {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = self._connect(timeout_s)
        try:
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
            answer = response.read()
        except TimeoutError:
            self.close()
            raise ServerUnreachable(
                f"{self.url} did not answer within {timeout_s:.0f} s", sent=True
            ) from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ServerUnreachable(
                f"the connection to {self.url} broke: {reason_of(error)}", sent=True
            ) from None
        if response.will_close:
            self.close()
        sent = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, sent, answer)

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._connection is None:
            kind: Any = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            connect_s = min(timeout_s, CONNECT_S)
            connection: http.client.HTTPConnection = kind(self._host, self._port, timeout=connect_s)
            try:
                connection.connect()
            except TimeoutError:
                raise ServerUnreachable(
                    f"cannot connect to {self.url}: no answer within {connect_s:g} s", sent=False
                ) from None
            except (OSError, ssl.SSLError) as error:
                reason = error.strerror or reason_of(error)
                raise ServerUnreachable(
                    f"cannot connect to {self.url}: {reason}", sent=False
                ) from None
            self._connection = connection
        assert self._connection.sock is not None, "a kept connection is open"
        self._connection.sock.settimeout(timeout_s)
        return self._connection

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def refusal(status: int, retry_after: str | None, answer: bytes) -> CallRefused:
    """The error in an answer that is no success; its body is an envelope, or not from a topics
    server.
    """
    try:
        problem = msgspec.json.decode(answer, type=_Envelope).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        reason = http.client.responses.get(status, "the answer is not from a topics server")
        problem = _Problem(f"http_{status}", reason)
    field = (problem.detail or {}).get("field")
    message = problem.message
    if isinstance(field, str) and field not in message:
        message = f"{message} ({field})"
    seconds = float(retry_after) if retry_after is not None and retry_after.isdigit() else None
    most = (problem.detail or {}).get("max_batch_records")
    most_records = most if isinstance(most, int) and most > 0 else None
    return CallRefused(status, problem.code, message, seconds, most_records)


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
    return f"/v0/topics/{quote(topic, safe='')}{rest}"


def router_path(router: str) -> str:
    """The path of a router, escaped in the same way."""
    if not router:
        raise click.UsageError("a router's name must not be empty")
    return f"/v0/routers/{quote(router, safe='')}"


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
