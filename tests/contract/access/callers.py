"""Callers in the tests of access: a server with one key of each kind, and the rights of each key.

The name of a key says which rights it grants. The restricted key may use names that start with
`t.`; `x.` is outside.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.contract.driver import Server

SCOPES: Final = ("read", "write", "delete", "admin")
KEYS: Final = {
    "all": "secret-all",
    "none": None,
    "wrong": "secret-al",
    **{scope: f"secret-{scope}" for scope in SCOPES},
    "all but read": "secret-no-read",
    "all but write": "secret-no-write",
    "all but delete": "secret-no-delete",
    "all but admin": "secret-no-admin",
    "prefix": "secret-prefix",
}
GRANTS: Final[dict[str, frozenset[str] | None]] = {
    "all": frozenset(SCOPES),
    "none": None,
    "wrong": None,
    **{scope: frozenset({scope}) for scope in SCOPES},
    **{f"all but {scope}": frozenset(SCOPES) - {scope} for scope in SCOPES},
    "prefix": frozenset(SCOPES),
}
INSIDE: Final = "t.in"
OUTSIDE: Final = "x.out"
ABSENT: Final = "x.non"
assert len(OUTSIDE) == len(ABSENT), "what is told of both has the same length"


def configured() -> str:
    """The keys as the environment has them."""
    entries = [f"{KEYS['all']}", f"{KEYS['prefix']}::t."]
    for caller, scopes in GRANTS.items():
        if scopes is not None and caller not in ("all", "prefix"):
            entries.append(f"{KEYS[caller]}:{'+'.join(sorted(scopes))}")
    return ",".join(entries)


@dataclass(slots=True)
class Told:
    """An answer: its status, its body, and the headers without the request's id and the length."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def code(self) -> str | None:
        """The code of a refusal."""
        error = json.loads(self.body)["error"] if self.body and self.status >= 400 else None
        return None if error is None else str(error["code"])

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class Guarded:
    """A server with keys, called with any of them."""

    def __init__(self, directory: Path, **env: str) -> None:
        self.server = Server(directory, {"TOPICS_API_KEYS": configured(), **env})
        self.api = self.server.start()

    def close(self) -> None:
        """Stop it cleanly."""
        self.server.stop()

    def ask(
        self,
        caller: str,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Told:
        """Send one request; for a stream return only the head."""
        secret = token if token is not None else KEYS[caller]
        sent = dict(headers or {})
        if secret is not None:
            sent["authorization"] = f"Bearer {secret}"
        asked = self.api.http.build_request(method, path, headers=sent, json=body)
        answer = self.api.http.send(asked, stream=True)
        try:
            is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
            content = b"" if is_stream else answer.read()
        finally:
            answer.close()
        told = dict(answer.headers)
        assert told.pop("x-request-id")
        told.pop("content-length", None)
        return Told(answer.status_code, content, told)

    def good(self, method: str, path: str, body: object = None) -> Any:
        """Send a request with the key of all rights; it must succeed."""
        told = self.ask("all", method, path, body)
        assert told.status < 300, told.body
        return told.json()

    @contextlib.contextmanager
    def socket(
        self, caller: str, *, subprotocols: Sequence[str] = (), token: str | None = None
    ) -> Iterator[ClientConnection]:
        """A WebSocket; raises `websockets.exceptions.InvalidStatus` if it is refused."""
        secret = token if token is not None else KEYS[caller]
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        url = self.api.url.replace("http://", "ws://") + "/v0/ws"
        offered: Any = list(subprotocols) or None
        with connect(
            url, additional_headers=headers, subprotocols=offered, open_timeout=30, proxy=None
        ) as socket:
            yield socket

    def refusal_of_socket(self, caller: str) -> httpx.Response:
        """The refusal of a WebSocket's opening."""
        try:
            with self.socket(caller):
                raise AssertionError("it was let in")
        except InvalidStatus as error:
            sent = error.response
            return httpx.Response(sent.status_code, content=bytes(sent.body or b""))


def said(socket: ClientConnection, **command: object) -> Any:
    """The answer to a command; frames of topics are skipped."""
    socket.send(json.dumps(command))
    for _ in range(1000):
        told = json.loads(socket.recv(timeout=30))
        if told["op"] not in ("record", "caught_up", "tombstone"):
            return told
    raise AssertionError("no answer among a thousand frames")
