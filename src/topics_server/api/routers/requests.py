"""Request shapes of router routes (§6).

Pure. Decoded once, defaults filled in; wrong types are `invalid_request` with the field's path. A
filter has the forms of a delete's `match`. Called by `api/routers/handlers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from topics_server.api.messages.bounded_lists import check_items
from topics_server.api.messages.requests import (
    decode_body,
    query_cursor,
    query_page_size,
    tag_match,
)
from topics_server.values.errors import invalid
from topics_server.values.limits import MATCH_PARTS
from topics_server.values.model import Guarantee, RouterDefinition, is_router_name, is_topic_name
from topics_server.values.router_answers import RouterSpec


class _Put(msgspec.Struct, gc=False, rename={"start": "from"}):
    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: str | list[msgspec.Raw] | None = None
    allow_cycle: bool = False
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    start: Literal["earliest", "head"] = "head"


_ABSENT: Final = msgspec.Raw(b"")


class _Lists(msgspec.Struct, gc=False):
    """The lists of a body, undecoded."""

    filter: msgspec.Raw = _ABSENT


_PUT: Final = msgspec.json.Decoder(_Put)
_LISTS: Final[msgspec.json.Decoder[msgspec.Struct]] = msgspec.json.Decoder(_Lists)
ROUTER_MEMBERS: Final = _Put.__struct_encode_fields__


class RouterQuery(msgspec.Struct, frozen=True):
    """The filter of a list: routers into or out of a topic, and names with a prefix."""

    prefix: str
    source: str | None
    dest: str | None
    after: str | None
    page_size: int


def decode_router(body: bytes) -> RouterSpec:
    """The body of a `PUT`."""
    check_items(body, _LISTS, {"filter": MATCH_PARTS})
    sent = decode_body(_PUT, body)
    for field, name in (("source", sent.source), ("dest", sent.dest)):
        if not is_topic_name(name):
            raise invalid(f"{field} must be a topic name", field)
    if sent.source == sent.dest:
        raise invalid("dest must be another topic than source", "dest")
    definition = RouterDefinition(
        source=sent.source,
        dest=sent.dest,
        preserve_node=sent.preserve_node,
        preserve_tag=sent.preserve_tag,
        filter=tag_match(sent.filter, "filter"),
        allow_cycle=sent.allow_cycle,
        guarantee=sent.guarantee,
    )
    return RouterSpec(definition, sent.create_dest, sent.start == "earliest")


def query_routers(query: Mapping[str, str]) -> RouterQuery:
    """The query of a list; refuses a source or destination that no topic can have."""
    for field in ("source", "dest"):
        name = query.get(field)
        if name is not None and not is_topic_name(name):
            raise invalid(f"{field} must be a topic name", field)
    return RouterQuery(
        prefix=query.get("prefix", ""),
        source=query.get("source"),
        dest=query.get("dest"),
        after=query_cursor(query, is_router_name),
        page_size=query_page_size(query),
    )
