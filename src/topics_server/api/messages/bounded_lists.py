"""Bounds lists and names in request bodies before decoding builds them. Pure.

The decoder checks the length of an array only after it has built the array, and a megabyte of
brackets becomes half a million objects. So `check_items` counts the items of the lists in a long
body first. It skips a short body, which cannot hold enough items to matter. Called by the request
shapes of `api`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from topics_server.values.appends import decode_json
from topics_server.values.errors import TopicsError, invalid
from topics_server.values.json_shape import has_more_items
from topics_server.values.limits import (
    CONTROL_MEMBERS_MAX,
    KIB,
    MATCH_TAG_BYTES_MAX,
    NODE_FILTER_IDS_MAX,
)

# A list in a body of this size takes less than a megabyte.
SHORT_BODY_BYTES_MAX: Final = 32 * KIB

_ANYTHING: Final = msgspec.json.Decoder(msgspec.Raw)

Refusal = Callable[[str, int], TopicsError]


def too_many(field: str, most: int) -> TopicsError:
    """The error for a list, or a map, with too many items."""
    return invalid(f"{field} has over {most} items", field)


def check_items(
    body: bytes,
    decoder: msgspec.json.Decoder[msgspec.Struct],
    most: Mapping[str, int],
    refusal: Refusal = too_many,
) -> None:
    """Refuse a body in which one of these fields has too many items.

    `decoder` keeps those fields undecoded (`msgspec.Raw`). Raises the error that `refusal` returns
    for the field and its bound, and `invalid_request` for a body that is not JSON.
    """
    if len(body) <= SHORT_BODY_BYTES_MAX:
        return
    lists = decode_json(decoder, body)
    for field, count in most.items():
        sent = memoryview(getattr(lists, field))
        if bytes(sent[:1]) in (b"[", b"{") and has_more_items(sent, count):
            raise refusal(field, count)


def check_members(body: bytes) -> None:
    """Refuse an object with more than `CONTROL_MEMBERS_MAX` members.

    Other code reports invalid JSON.
    """
    if len(body) > SHORT_BODY_BYTES_MAX:
        decode_json(_ANYTHING, body)
        if has_more_items(body, CONTROL_MEMBERS_MAX):
            raise invalid(f"the body has over {CONTROL_MEMBERS_MAX} members")


def node_names(sent: str | list[str] | None, max_node_bytes: int) -> list[str]:
    """The nodes in a filter, without repeats.

    Raises `invalid_request` for too many or too long ones.
    """
    match sent:
        case None:
            return []
        case str(node):
            check_node(node, max_node_bytes)
            return [node]
        case several:
            if len(several) > NODE_FILTER_IDS_MAX:
                raise invalid(f"node takes at most {NODE_FILTER_IDS_MAX} ids", "node")
            for index, node in enumerate(several):
                check_node(node, max_node_bytes, f"node[{index}]")
            return sorted(set(several))


def check_node(node: str, max_node_bytes: int, field: str = "node") -> None:
    """Raise `invalid_request` for a node that is longer than a record may have."""
    size = len(node.encode())
    if size > max_node_bytes:
        raise invalid(f"{field} has {size} bytes; the limit is {max_node_bytes}", field)


def check_tag(tag: str, field: str) -> None:
    """Raise `invalid_request` for a tag that is longer than any configured limit allows."""
    if len(tag) > MATCH_TAG_BYTES_MAX or len(tag.encode()) > MATCH_TAG_BYTES_MAX:
        raise invalid(f"{field} is over {MATCH_TAG_BYTES_MAX} bytes", field)
