"""Requests on topics as values: list, configure, drop, delete records. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from topics_server.client.addresses import checked_path
from topics_server.client.calls import Call, QueueAddress, reader
from topics_server.client.errors import BadAnswer
from topics_server.client.values import plain

# Idempotent methods: a repeated request has the same effect (RFC 9110 §9.2.2).
_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})


class TopicDescription(msgspec.Struct, frozen=True):
    """A topic in the server's form; a list leaves out its type and configuration."""

    topic: str
    type: str | None = None
    head_seq: int = 0
    earliest_seq: int = 0
    count: int = 0
    bytes: int = 0
    epoch: int = 0
    created: bool = False
    config: dict[str, Any] = {}


class TopicsPage(msgspec.Struct, frozen=True):
    """Topics in name order; `next_cursor` leads to the next page."""

    topics: list[TopicDescription]
    next_cursor: str | None = None


class _Deleted(msgspec.Struct):
    deleted: int


_read_page: Final = reader(TopicsPage)
_read_topic: Final = reader(TopicDescription)
_read_deleted: Final = reader(_Deleted)


def list_topics(prefix: str, cursor: str | None) -> Call[TopicsPage]:
    """A page of the topics whose names begin with `prefix`."""
    query = {"page_size": "1000"} | ({"prefix": prefix} if prefix else {})
    if cursor is not None:
        query["cursor"] = cursor
    path = f"/v0/topics?{urlencode(query)}"
    return Call(method="GET", path=path, body=None, read=_read_page, repeatable=True)


def put(where: QueueAddress, config: Mapping[str, Any]) -> Call[TopicDescription]:
    """Make a topic, or change its configuration."""
    body = msgspec.json.encode(dict(config))
    return Call(method="PUT", path=where.path(), body=body, read=_read_topic, repeatable=True)


def state(where: QueueAddress) -> Call[TopicDescription]:
    """The state of a topic."""
    path = where.path("?touch=false")
    return Call(method="GET", path=path, body=None, read=_read_topic, repeatable=True)


def drop(where: QueueAddress) -> Call[None]:
    """Drop a topic with all its records."""
    return Call(
        method="DELETE",
        path=where.path(),
        body=None,
        read=_nothing,
        repeatable=True,
        is_removal=True,
    )


def delete(
    where: QueueAddress, tag: str | None, tag_prefix: str | None, before_seq: int | None
) -> Call[int]:
    """Delete the records that meet every given condition; returns their number."""
    if tag is not None and tag_prefix is not None:
        raise ValueError("tag and tag_prefix: give one of them")
    body: dict[str, Any] = {} if before_seq is None else {"before_seq": before_seq}
    if tag is not None:
        body["match"] = ["tag", "Eq", tag]
    elif tag_prefix is not None:
        body["match"] = ["tag", "Glob", f"{tag_prefix}*"]
    if not body:
        raise ValueError("give a tag, a tag_prefix or before_seq")

    def read(answer: bytes) -> int:
        return _read_deleted(answer).deleted

    sent = msgspec.json.encode(body)
    path = where.path("/delete")
    return Call(method="POST", path=path, body=sent, read=read, repeatable=True)


def any_call(method: str, path: str, body: Any) -> Call[Any]:
    """Any request to the server; returns the JSON of the answer."""
    if not path.startswith("/"):
        raise ValueError("a path begins with /")
    return Call(
        method=method,
        path=checked_path(path),
        body=None if body is None else msgspec.json.encode(body),
        read=_anything,
        repeatable=method.upper() in _IDEMPOTENT,
    )


def _anything(answer: bytes) -> Any:
    try:
        return plain(answer) if answer else None
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"the answer is not JSON: {error}") from None


def _nothing(_answer: bytes) -> None:
    return None
