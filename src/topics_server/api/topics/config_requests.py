"""Merge patches of a configuration, and unknown members of a body. Pure.

A `PATCH` is a JSON merge patch (RFC 7396) of the configuration in the form that answers show: a
member replaces the field, null sets the field's default. Called by `api/topics/handlers`, and by
the other control-plane handlers for `ignored_members`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from topics_server.api.messages.bounded_lists import check_members
from topics_server.api.messages.requests import decode_config
from topics_server.api.messages.responses import render_config
from topics_server.values.appends import decode_json
from topics_server.values.errors import invalid
from topics_server.values.json_shape import exceeds_depth
from topics_server.values.limits import (
    IGNORED_MEMBERS_MAX,
    IGNORED_NAME_CHARS_MAX,
    JSON_DEPTH_MAX,
)
from topics_server.values.model import TopicConfig

CONFIG_MEMBERS: Final = (
    *("type", "ttl_ms", "cap_records", "cap_bytes", "discard", "durable", "durability"),
    *("priority", "auto_priority", "auto_create", "idempotency_window_ms", "dedupe_node"),
    *("lease_ms", "claim_jitter_ms", "max_deliveries", "dead_letter", "leases_durable"),
    "lease_log",
)
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_config_patch(body: bytes, topic: str) -> Callable[[TopicConfig], TopicConfig]:
    """A function that applies a merge patch to the configuration of `topic`.

    Raises `invalid_request` for a patch that is not an object or that no configuration can take;
    the returned function raises it for a patch that does not fit its configuration.
    """
    patch = members_of(body)
    known = {name: raw for name, raw in patch.items() if name in CONFIG_MEMBERS}

    def merged(config: TopicConfig) -> TopicConfig:
        fields: dict[str, Any] = msgspec.json.decode(render_config(config), type=dict[str, Any])
        # This field has two names: a value under either name replaces both.
        for name, other in (("durable", "durability"), ("durability", "durable")):
            if name in known:
                fields.pop(other, None)
        for name, raw in known.items():
            if bytes(raw) == b"null" and name != "type":
                fields.pop(name, None)
            elif name != "durable" or bytes(known.get("durability", b"null")) == b"null":
                fields[name] = raw
        return decode_config(msgspec.json.encode(fields), topic).config

    merged(TopicConfig())
    return merged


def members_of(body: bytes) -> dict[str, msgspec.Raw]:
    """The members of a body that is one JSON object. Raises `invalid_request`."""
    check_members(body)
    members = decode_json(_OBJECT, body)
    if exceeds_depth(body):
        raise invalid(f"JSON is nested deeper than {JSON_DEPTH_MAX} levels")
    return members


def ignored_members(body: bytes, known: Iterable[str]) -> list[str]:
    """Names of unknown members: the first few, in order, each cut to a length."""
    if not body:
        return []
    meant = set(known)
    strange = [name for name in members_of(body) if name not in meant]
    return [name[:IGNORED_NAME_CHARS_MAX] for name in strange[:IGNORED_MEMBERS_MAX]]
