"""A JSON stream for the programs in this folder: conditional appends and new messages."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import httpx


class Answer(NamedTuple):
    """The result of an append: 200 stored, 204 already stored, 403 fenced, 409 a gap."""

    status: int
    epoch: int | None  # the producer's epoch, by the server
    seq: int | None  # the highest accepted seq (200, 204) or the next expected one (409)


class Stream:
    """One stream by its URL; created if it does not exist."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(timeout=60, trust_env=False)
        self._offset = "-1"
        ask(self._http, "PUT", url, headers={"Content-Type": "application/json"})

    def append(self, producer: str, epoch: int, seq: int, value: dict[str, Any]) -> Answer:
        """Append `value` if this epoch and seq are the next of `producer`.

        After a lost answer the request is repeated with the same numbers. So a 204 may refer to an
        earlier try of this program: a caller that needs to distinguish them reads the stream.
        """
        headers = {
            "Producer-Id": producer,
            "Producer-Epoch": str(epoch),
            "Producer-Seq": str(seq),
        }
        answer = ask(self._http, "POST", self.url, headers=headers, json=value)
        number = "Producer-Expected-Seq" if answer.status_code == 409 else "Producer-Seq"
        return Answer(
            answer.status_code,
            _number(answer, "Producer-Epoch"),
            _number(answer, number),
        )

    def news(self) -> list[dict[str, Any]]:
        """The messages since the last call, oldest first."""
        found: list[dict[str, Any]] = []
        while True:
            answer = ask(self._http, "GET", self.url, params={"offset": self._offset})
            found += answer.json()
            self._offset = answer.headers["Stream-Next-Offset"]
            if answer.headers.get("Stream-Up-To-Date") == "true":
                return found


def ask(http: httpx.Client, method: str, url: str, **request: Any) -> httpx.Response:
    """Repeat the request until it has an answer. The refusals of a conditional append count as
    answers.
    """
    pause_s = 0.1
    while True:
        try:
            answer = http.request(method, url, **request)
        except httpx.TransportError:
            pass
        else:
            if answer.status_code < 500 and answer.status_code != 429:
                if answer.status_code not in (403, 404, 409):
                    answer.raise_for_status()
                return answer
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 2.0)


def _number(answer: httpx.Response, header: str) -> int | None:
    text = answer.headers.get(header)
    return None if text is None else int(text)
