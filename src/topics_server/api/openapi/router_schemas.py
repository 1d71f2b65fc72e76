"""JSON schemas of routers for the OpenAPI document. Pure.

Used by `api/openapi/document`.
"""

from __future__ import annotations

from topics_server.api.openapi.schemas import (
    Schema,
    all_of,
    boolean,
    codes_of_errors,
    ignored_members,
    list_of,
    object_of,
    ref,
    tag_tuple,
    text,
    u64,
    values_of,
)
from topics_server.values.model import Guarantee


def router_schemas() -> Schema:
    """The requests and answers of routers, and of a seal."""
    performance = {"performance": ref("Performance")}
    topics = {"source": text(), "dest": text()}
    guarantee = text(enum=values_of(Guarantee), default=Guarantee.AT_LEAST_ONCE.value)
    rules = {
        "preserve_node": boolean(True, "Copies keep `$node`."),
        "preserve_tag": boolean(True, "Copies keep `$tag`."),
        "filter": {
            "anyOf": [text(), tag_tuple(), {"type": "null"}],
            "description": "Copies only records whose tag matches, as in a delete; a string: "
            "exactly this one.",
        },
        "allow_cycle": boolean(False, "The router may close a cycle; the hop cap ends the copies."),
        "guarantee": guarantee,
    }
    row = {"router": text(), **topics, "guarantee": guarantee, "forwarded_total": u64()}
    place = {
        "forwarded_total": u64("Copies made since the router was created."),
        "cursor_seq": u64("The last examined seq of the source."),
        "lag": u64("Unexamined seqs of the source."),
        "state": text(enum=["running", "stalled"]),
        "reason": object_of("code message", code=text(enum=codes_of_errors()), message=text())
        | {"description": "Why the router is stalled; absent if it is running."},
    }
    page = {"routers": list_of(all_of(row)), "next_cursor": text("Absent on the last page.")}
    defined = {"router": text(), **topics, **rules}
    return {
        "RouterRequest": object_of(
            "source dest",
            **topics,
            **rules,
            create_dest=boolean(True, "Create missing topics."),
            **{
                "from": text(
                    "Where a new router starts.", enum=["earliest", "head"], default="head"
                )
            },
        ),
        "RouterPutResult": all_of(
            defined | {"created": boolean(), "ignored": ignored_members()} | performance,
            optional="ignored",
        ),
        "RouterState": all_of(defined | place | performance, optional="reason"),
        "RouterList": all_of(page | performance, optional="next_cursor"),
        "SealRequest": object_of(
            "",
            topics={
                "anyOf": [list_of(text(), maxItems=1000), {"type": "null"}],
                "description": "Names of topics; default: every topic that the key may use.",
            },
        ),
        "SealResult": all_of(
            {"topics": u64(), "segments": u64(), "unsealed_records": u64()} | performance
        ),
        "RouterDropResult": all_of({"router": text(), "deleted": boolean()} | performance),
    }
