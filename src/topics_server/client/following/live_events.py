"""The events of a live stream as values, and the request for the next stream.

`LivePosition` is the state between two streams: the cursor of the last event that was read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from topics_server.client.addresses import checked_url, segment
from topics_server.client.calls import DEFAULT_URL
from topics_server.client.errors import BadAnswer

Option = str | int | float | bool | Sequence[Any] | None


class LiveRecord(
    msgspec.Struct,
    frozen=True,
    rename={
        name: f"${name}"
        for name in ("seq", "ts", "tag", "node", "encoding", "content_type", "trace")
    },
):
    """One record; `ts` in ms since 1970.

    With `encoding` "base64", `data` holds bytes of a stream of this `content_type`.
    """

    seq: int
    ts: int
    data: Any = None
    tag: str | None = None
    node: str | None = None
    meta: Any = None
    encoding: str | None = None
    content_type: str | None = None
    trace: str | None = None


# The first use of the type: it must not be in two threads at once (decision 0361).
msgspec.convert({"$seq": 0, "$ts": 0}, LiveRecord)


class LiveEvent(msgspec.Struct, frozen=True):
    """One event of a live stream.

    `kind`: `record`, `tombstone`, `caught-up`, `topic-created`, `topic-deleted`, `left-out` (the
    topics in `data` match, but the stream follows its maximum), or a kind of a later server. `data`
    has the members as they were sent; `records` has the records of a `record`. A stream continues
    behind the event from `cursor`, and repeats the event from `cursor_before`.
    """

    kind: str
    topic: str
    data: dict[str, Any]
    cursor: str
    records: tuple[LiveRecord, ...] = ()
    cursor_before: str = ""

    @property
    def gap(self) -> tuple[int, int, str] | None:
        """The first and the last lost seq of a tombstone, and the reason."""
        if self.kind != "tombstone":
            return None
        return self.data["gap_from"], self.data["gap_to"], self.data["reason"]


# The code of an `error` event that names topics and does not end the stream.
_LEFT_OUT: Final = 429
_MEMBERS: Final = msgspec.json.Decoder(dict[str, Any])


class LivePosition:
    """The followed topics, and the cursor up to which they were read."""

    def __init__(
        self,
        topics: str | Sequence[str],
        prefix: str | Sequence[str] | None,
        url: str | None,
        cursor: str | None,
        options: Mapping[str, Option],
    ) -> None:
        """Raises `ValueError` for a wrong URL, or nothing to follow."""
        base = url or DEFAULT_URL
        checked_url(base, DEFAULT_URL)
        self.url = base.rstrip("/")
        self.cursor = cursor
        names = [topics] if isinstance(topics, str) else list(topics)
        prefixes = [prefix] if isinstance(prefix, str) else list(prefix or ())
        if not names and not prefixes:
            raise ValueError("give a topic or a prefix to follow")
        query = {name: _text(value) for name, value in options.items() if value is not None}
        if len(names) == 1 and not prefixes:
            path = f"/v0/topics/{segment(names[0])}/live"
        else:
            path = "/v0/live"
            lists = {"topics": ",".join(names)} if names else {}
            query = lists | ({"prefix": ",".join(prefixes)} if prefixes else {}) | query
        self.path = f"{path}?{urlencode(query)}" if query else path

    def headers(self) -> dict[str, str]:
        """The headers of the next stream."""
        return {"Last-Event-ID": self.cursor} if self.cursor else {}

    def take(self, kind: str, payload: str, event_id: str) -> LiveEvent | None:
        """The event of a frame; None for a frame with only a position. Raises `BadAnswer`."""
        before = self.cursor or ""
        if event_id:
            self.cursor = event_id
        if not payload:
            return None
        try:
            data = _members(payload)
            if kind == "error":
                if data.get("code") != _LEFT_OUT or "topics" not in data:
                    return None
                kind = "left-out"
            records = data.get("records", ()) if kind == "record" else ()
            found = tuple(msgspec.convert(record, LiveRecord) for record in records)
            topic = str(data.get("topic", ""))
            return LiveEvent(kind, topic, data, self.cursor or "", found, before)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadAnswer(f"an event of a live stream: {error}") from None


def _members(payload: str) -> dict[str, Any]:
    """The members of an event. A number that exceeds a float, like 1e400, becomes infinite."""
    try:
        return _MEMBERS.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        try:
            found = json.loads(payload)
        except (ValueError, RecursionError):
            raise error from None
        return msgspec.convert(found, dict[str, Any])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
