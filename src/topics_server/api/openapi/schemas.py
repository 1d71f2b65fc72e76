"""JSON schemas of requests and responses for the OpenAPI document. Pure.

Defaults, clamps and enumerations come from `limits` and `model`, so that they cannot drift. Used by
`api/openapi/document`.
"""

from __future__ import annotations

from typing import Any, Final

from topics_server.api.messages.trace_headers import TRACE_ABOUT, TRACE_PATTERN
from topics_server.api.queues.requests import CLAIM_WAIT_MS_MAX, NACK_DELAY_MS_MAX
from topics_server.api.watch.requests import (
    FRAME_BYTES_DEFAULT,
    HEARTBEAT_MS_DEFAULT,
    HEARTBEAT_MS_MAX,
    HEARTBEAT_MS_MIN,
)
from topics_server.queue.leases.jobs import SkipReason
from topics_server.values.errors import Code
from topics_server.values.limits import (
    CLAIM_JITTER_MS_MAX,
    DIFF_LIMIT_DEFAULT,
    DIFF_WAIT_MS_MAX,
    FILTER_DEPTH_MAX,
    FILTER_LEAVES_MAX,
    IGNORED_MEMBERS_MAX,
    IGNORED_NAME_CHARS_MAX,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    LIVE_PREFIXES_MAX,
    NACK_ERROR_BYTES_MAX,
    NODE_FILTER_IDS_MAX,
    PAGE_BYTES_DEFAULT,
    PAGE_BYTES_MAX,
    PRIORITY_MAX,
    U32_MAX,
    U64_MAX,
)
from topics_server.values.model import (
    Discard,
    Durability,
    Guarantee,
    LossReason,
    TopicConfig,
    TopicType,
)

Schema = dict[str, Any]

_DEFAULTS: Final = TopicConfig()


FILTER_ABOUT: Final = (
    'A tag, `["tag"|"node", "Eq"|"In", value]`, `["tag", "Glob", "prefix*"]`, '
    '`["Or"|"And", filter, …]` or `["Not", filter]`; at most '
    f"{FILTER_LEAVES_MAX} leaves, {FILTER_DEPTH_MAX} deep."
)


def ref(name: str) -> Schema:
    """A reference to a named schema."""
    return {"$ref": f"#/components/schemas/{name}"}


CONDITION: Final[Schema] = {"if": {"anyOf": [ref("Condition"), {"type": "null"}]}}


def object_of(required: str, **properties: Schema) -> Schema:
    """An object; `required` names members, separated by spaces."""
    names = required.split()
    assert set(names) <= set(properties)
    schema: Schema = {"type": "object"}
    if properties:
        schema["properties"] = properties
    if names:
        schema["required"] = names
    return schema


def text(about: str = "", **more: Any) -> Schema:
    """A string."""
    return {"type": "string"} | ({"description": about} if about else {}) | more


def u64(about: str = "", **more: Any) -> Schema:
    """An unsigned 64-bit integer.

    Without an example the reference page shows the maximum, which JavaScript rounds.
    """
    described = {"description": about} if about else {}
    shown = {} if "default" in more else {"examples": [1]}
    return {"type": "integer", "minimum": 0, "maximum": U64_MAX} | shown | described | more


def boolean(default: bool | None = None, about: str = "") -> Schema:
    """A boolean."""
    described = {"description": about} if about else {}
    return {"type": "boolean"} | ({} if default is None else {"default": default}) | described


def list_of(items: Schema, **more: Any) -> Schema:
    """An array."""
    return {"type": "array", "items": items} | more


def config_schema() -> Schema:
    """The configuration of a topic, with the default of every field."""
    name = {"type": ["string", "null"], "default": None}
    return object_of(
        "",
        type=text("Cannot change once set.", enum=values_of(TopicType), default="log"),
        ttl_ms=u64("Age after which records expire; 0 is off.", default=_DEFAULTS.ttl_ms),
        cap_records=u64("The most retained records; 0 is off.", default=_DEFAULTS.cap_records),
        cap_bytes=u64("The most retained bytes; 0 is off.", default=_DEFAULTS.cap_bytes),
        discard=text("What a full topic does.", enum=values_of(Discard), default="old"),
        durable=boolean(
            False, "A short form of `durability`: true is `fsync`, false `disk`. `durability` wins."
        ),
        durability=text("The commit class.", enum=values_of(Durability), default="disk"),
        priority={
            "type": ["integer", "null"],
            "default": None,
            "minimum": -(2**31),
            "maximum": 2**31 - 1,
            "description": f"Clamped to {PRIORITY_MAX} in both directions.",
        },
        auto_priority=boolean(_DEFAULTS.auto_priority),
        auto_create=boolean(_DEFAULTS.auto_create),
        idempotency_window_ms=u64(default=_DEFAULTS.idempotency_window_ms),
        dedupe_node=boolean(_DEFAULTS.dedupe_node),
        lease_ms=u64(f"Clamped to {LEASE_MS_MIN}..{LEASE_MS_MAX}.", default=_DEFAULTS.lease_ms),
        claim_jitter_ms=u64(
            f"Clamped to {CLAIM_JITTER_MS_MAX}.", default=_DEFAULTS.claim_jitter_ms
        ),
        max_deliveries=u64(default=_DEFAULTS.max_deliveries),
        dead_letter=name | {"description": "Another topic's name."},
        leases_durable=boolean(_DEFAULTS.leases_durable),
        lease_log={
            "type": ["string", "null"],
            "description": "The topic that receives this queue's lease events; absent if none.",
        },
    )


def values_of(kind: type[TopicType | Discard | Durability | LossReason | Guarantee]) -> list[str]:
    """The values of an enumeration."""
    return [member.value for member in kind]


def all_schemas() -> Schema:
    """Every named schema, for `components.schemas`."""
    return {
        "TopicConfig": config_schema(),
        "TopicConfigPatch": _config_patch(),
        **_request_schemas(),
        **_answer_schemas(),
        **_queue_requests(),
        **_queue_answers(),
        **_other_answers(),
    }


def _watch_request() -> Schema:
    start = object_of(
        "",
        from_seq=u64("Exclusive; 0 is the earliest retained.", default=0),
        tail=boolean(False, "Start at the head; overrides `from_seq`."),
        since={"anyOf": [u64("ms since 1970."), text("RFC 3339, or `10m` back."), {"type": "null"}]}
        | {"description": "Start with the records committed then."},
        last={"anyOf": [u64("The last so many records.", minimum=1), {"type": "null"}]},
        consumer={"type": ["string", "null"], "description": "Start where this consumer is."},
        ack={
            "enum": ["manual", "auto"],
            "default": "manual",
            "description": "`auto`: the stream commits what its socket took; needs `write`.",
        },
    )
    of_prefix = object_of(
        "", **{name: start["properties"][name] for name in ("tail", "since", "last")}
    )
    beats = f"Clamped to {HEARTBEAT_MS_MIN}..{HEARTBEAT_MS_MAX}."
    asked = object_of(
        "",
        topics={"type": "object", "additionalProperties": start},
        prefixes={
            "type": "object",
            "maxProperties": LIVE_PREFIXES_MAX,
            "additionalProperties": of_prefix,
            "description": "Also the topics whose names begin so, each prefix with the start of "
            "those that exist; later ones are read from their first record.",
        },
        node=_nodes(),
        limit=u64("Records of a frame; clamped, 0 is the default.", default=DIFF_LIMIT_DEFAULT),
        max_batch_bytes=u64(
            f"Bytes of a frame; 0 is {PAGE_BYTES_DEFAULT}, clamped to {PAGE_BYTES_MAX}.",
            default=FRAME_BYTES_DEFAULT,
        ),
        heartbeat_ms=u64(beats, default=HEARTBEAT_MS_DEFAULT),
        include_meta=boolean(True),
        include_tags=boolean(False),
        include_data=boolean(True),
        consistency=text(
            "`strong`: only synced records.", enum=["eventual", "strong"], default="eventual"
        ),
        cursor={"type": ["string", "null"], "description": "An earlier `id`: continue after it."},
        wait=boolean(False, "Wait for missing topics and read them from 0."),
        filter={
            "description": FILTER_ABOUT,
            "anyOf": [text("An exact tag."), {"type": "array"}, {"type": "null"}],
        },
    )
    return asked | {"description": "`topics`, `prefixes`, or both, with at least one member."}


def _nodes() -> Schema:
    return {
        "anyOf": [text(), list_of(text(), maxItems=NODE_FILTER_IDS_MAX), {"type": "null"}],
        "description": "Leave out the records of these nodes.",
    }


def tag_tuple() -> Schema:
    """A match on tags of three parts."""
    parts = [{"const": "tag"}, {"enum": ["Eq", "Glob"]}, {"type": "string"}]
    return {"type": "array", "minItems": 3, "maxItems": 3, "prefixItems": parts}


def _request_schemas() -> Schema:
    sent = object_of(
        "data",
        data={"description": "Any JSON value, kept byte for byte."},
        tag={"type": ["string", "null"]},
        node={"type": ["string", "null"]},
        meta={"type": ["object", "null"]},
        delay_ms={"type": ["integer", "null"], "description": "Ms until it can be claimed."},
        deliver_at_ms={"type": ["integer", "null"], "description": "Claimable from this time on."},
    )
    return {
        "AppendRequest": object_of(
            "records",
            records=list_of(sent, minItems=1),
            node={"type": ["string", "null"], "description": "The node of records that name none."},
            idempotency_key={"type": ["string", "null"], "maxLength": 256},
            idempotency={"enum": ["per_record", None], "description": "A key for each record."},
            create={"type": ["boolean", "null"], "description": "Overrides `auto_create`."},
            config={"anyOf": [ref("TopicConfig"), {"type": "null"}]},
            disable_backpressure={"type": ["boolean", "null"], "default": False},
            **CONDITION,
        ),
        "DiffRequest": object_of(
            "",
            from_seq=u64("Exclusive; 0 is the earliest retained.", default=0),
            limit=u64("Clamped; 0 is the default.", default=DIFF_LIMIT_DEFAULT),
            node=_nodes(),
            include_tags=boolean(False),
            include_meta=boolean(True),
            wait_ms=u64(f"Clamped to {DIFF_WAIT_MS_MAX}.", default=0),
            max_batch_bytes=u64(
                f"Clamped to {PAGE_BYTES_MAX}; 0 is the default.", default=PAGE_BYTES_DEFAULT
            ),
            filter={
                "description": FILTER_ABOUT,
                "anyOf": [text("An exact tag."), {"type": "array"}, {"type": "null"}],
            },
            since={
                "anyOf": [u64("ms since 1970."), text("RFC 3339, or `10m` ago."), {"type": "null"}]
            },
            last={"anyOf": [u64("Only the last N records."), {"type": "null"}]},
            consumer={"type": ["string", "null"], "description": "Read from where it is."},
            ack={"enum": ["manual", "auto"], "default": "manual"},
        ),
        "WatchRequest": _watch_request(),
        "DeleteRequest": object_of(
            "",
            before_seq={"anyOf": [u64("Exclusive."), {"type": "null"}]},
            match={
                "anyOf": [
                    text("An exact tag."),
                    tag_tuple(),
                    {"type": "null"},
                ]
            },
            **CONDITION,
        )
        | {"description": "`before_seq`, `match`, or both: then records must match both."},
    }


def _answer_schemas() -> Schema:
    performance = {"performance": ref("Performance")}
    place = {"topic": text(), "head_seq": u64(), "earliest_seq": u64()}
    size = {"count": u64(), "bytes": u64()}
    stamp = {"type": ["integer", "null"]}
    epoch = u64("The name's incarnation: one more after each drop and re-creation.")
    row = (
        {"epoch": epoch}
        | place
        | size
        | {"durable": boolean(), "effective_priority": {"type": "integer"}}
    )
    met = {"condition": {"const": "met"}}
    done = {"topic": text(), "created": boolean(), **met}
    state = {
        "epoch": epoch,
        **(place | size),
        "type": text(enum=values_of(TopicType)),
        "next_seq": u64(),
        "disk_bytes": u64(),
        "damaged_records": u64(),
        "config": ref("TopicConfig"),
        "queue": ref("QueueCounts"),
        "stream": ref("StreamState"),
        "effective_priority": {"type": "integer"},
        "last_write_ts": stamp,
        "last_read_ts": stamp,
        **performance,
    }
    stream = {
        "path": text("The topic's path as a stream."),
        "content_type": text(),
        "closed": boolean(),
        "ttl_s": u64("Seconds from its last use to its removal."),
        "expires_at": text("Time of its removal."),
        "forked_from": all_of({"path": text(), "upto_seq": u64()}),
    }
    page = {
        "epoch": epoch,
        **place,
        "records": list_of(ref("Record")),
        "next_from_seq": u64(),
        "caught_up": boolean(),
        "tombstone": {"anyOf": [ref("Tombstone"), {"type": "null"}]},
        "lag": u64(),
        **performance,
    }
    appended = {
        **done,
        **{name: u64() for name in ("first_seq", "last_seq", "head_seq", "count")},
        "seqs": list_of(u64(), description="In request order."),
        "deduped": boolean(),
        **performance,
    }
    row = {
        "topics": list_of(all_of(row)),
        "next_cursor": text("Absent on the last page."),
        **performance,
    }
    dropped = {"topic": text(), "deleted": boolean(), "routers_removed": list_of(text())}
    watched = all_of(
        {"from_seq": u64(), "head_seq": u64(), "earliest_seq": u64(), "waiting": {"const": True}},
        optional="waiting",
    )
    session = {
        "wid": text("Identifies the session. Without keys, it opens the stream."),
        "stream_url": text(),
        "session_ttl_ms": u64("How long the session lives without a stream."),
        "topics": {"type": "object", "additionalProperties": watched},
        "left_out": list_of(text(), description="Some that match, beyond the most of a session."),
        **performance,
    }
    ticket = {
        "ticket": text("With `ticket=true`: opens the stream once, as `?ticket=`."),
        "ticket_ttl_ms": u64("How long the ticket is valid."),
    }
    return {
        "WatchSession": all_of(
            session | ticket | {"ignored": ignored_members()},
            optional="ticket ticket_ttl_ms ignored left_out",
        ),
        "PutResult": all_of(
            done
            | {
                "config": ref("TopicConfig"),
                "changed": {
                    "type": "object",
                    "additionalProperties": {"type": "array", "minItems": 2, "maxItems": 2},
                    "description": "`{field: [old, new]}` of a topic that existed before.",
                },
                "ignored": ignored_members(),
            }
            | performance,
            optional="changed ignored condition",
        ),
        "TopicState": all_of(state, optional="queue stream"),
        "StreamState": all_of(stream, optional="ttl_s expires_at forked_from"),
        "Page": all_of(page),
        "AppendResult": all_of(appended, optional="seqs condition"),
        "DeleteResult": all_of(
            place | size | {"deleted": u64()} | met | performance, optional="condition"
        ),
        "DropResult": all_of(dropped | met | performance, optional="condition"),
        "TopicList": all_of(row, optional="next_cursor"),
    }


def _held(**more: Schema) -> Schema:
    """Leases of a node."""
    return {
        "node": text("The worker that holds the leases.", minLength=1),
        "seqs": list_of(u64(), minItems=1),
        "lease_ids": {
            "type": ["array", "null"],
            "items": text(),
            "description": "One for each seq. A seq whose current lease differs is skipped.",
        },
        **more,
    }


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _queue_requests() -> Schema:
    lease_ms = f"Clamped to {LEASE_MS_MIN}..{LEASE_MS_MAX}."
    match: Schema = {"anyOf": [text("An exact tag."), {"type": "array"}, {"type": "null"}]}
    wanted: dict[str, Schema] = {
        "max": {"type": "integer", "minimum": 1, "maximum": U32_MAX, "default": 1},
        "lease_ms": {"anyOf": [u64(lease_ms), {"type": "null"}]},
        "wait_ms": u64(f"Time to wait for a job; clamped to {CLAIM_WAIT_MS_MAX}.", default=0),
    }
    completed = {name: schema for name, schema in _held().items() if name != "node"}
    return {
        "ClaimRequest": object_of(
            "node",
            node=text("The worker that claims.", minLength=1),
            **wanted,
            ack=_or_null(object_of("seqs", **completed))
            | {"description": "Jobs that the node completes with this request, as an ack does."},
        ),
        "AckRequest": object_of(
            "node seqs",
            **_held(
                claim_next=_or_null(object_of("", **wanted))
                | {"description": "Jobs that the node takes with this request, as a claim does."}
            ),
        ),
        "NackRequest": object_of(
            "node seqs",
            **_held(
                delay_ms=u64(f"Clamped to {NACK_DELAY_MS_MAX}.", default=0),
                error={
                    "type": ["string", "null"],
                    "description": "Why the job failed. The dead letter carries it as "
                    f"`meta.$dead_letter_error`. Cut to {NACK_ERROR_BYTES_MAX} bytes.",
                },
            ),
        ),
        "ExtendRequest": object_of(
            "node seqs lease_ms",
            **_held(lease_ms=u64(lease_ms), no_more={"type": "boolean", "default": False}),
        ),
        "RedriveRequest": object_of(
            "",
            **{"from": text("Default: the queue's `dead_letter`.")},
            seqs=list_of(u64(), minItems=1),
            tag=text("An exact tag."),
            match=match | {"description": "As in a delete."},
            all=boolean(False),
            after_seq=u64("`next_after_seq` of the previous call.", default=0),
            max={"type": "integer", "minimum": 1, "maximum": U32_MAX},
        )
        | {"description": "Exactly one of `seqs`, `tag`, `match` and `all`."},
    }


def _queue_answers() -> Schema:
    performance = {"performance": ref("Performance")}
    counted = {"ready": u64(), "in_flight": u64()}
    skipped = {"topic": text(), "skipped": list_of(u64())}
    reasons = {
        "type": "object",
        "additionalProperties": text(enum=[reason.value for reason in SkipReason]),
        "description": "Why each seq was skipped; absent if none was.",
    }
    held = {**skipped, "reasons": reasons}
    job = {
        "$seq": u64(),
        "lease_id": text(pattern="^lease_[0-9a-f]+$"),
        "deadline": u64("Milliseconds."),
        "$ts": u64("Milliseconds."),
        "$node": text(),
        "$tag": text(),
        "$trace": text(TRACE_ABOUT, pattern=TRACE_PATTERN),
        "deliveries": u64("Deliveries so far, including this one."),
        "$encoding": text("Record of bytes: the encoding of `data`.", enum=["base64"]),
        "$content_type": text("Record of bytes: its content type."),
        "data": {},
        "meta": {"type": "object"},
    }
    lease = {
        "seq": u64(),
        "node": text(),
        "lease_id": text(),
        "deadline": u64(),
        "deliveries": u64(),
        "claimed_ts": u64(),
    }
    claimed = {
        "topic": text(),
        "claimed": list_of(object_of("$seq lease_id deadline $ts deliveries data", **job)),
        "count": u64(),
        "ready": u64(),
    }
    acked = all_of(
        {"acked": u64(), "skipped": list_of(u64()), "reasons": reasons}, optional="reasons"
    ) | {"description": "The result of the request's `ack`; absent without one."}
    following = all_of({name: claimed[name] for name in ("claimed", "count", "ready")}) | {
        "description": "The result of the request's `claim_next`; absent without one."
    }
    deadlines = {"type": "object", "additionalProperties": u64()}
    redriven = {"from": text(), "redriven": u64(), "more": boolean(), "next_after_seq": u64()}
    row = {"topic": text(), "leases": list_of(all_of(lease)), "next_cursor": text()}
    return {
        "QueueCounts": all_of(counted | {"delayed": u64(), "dead_lettered": u64()}),
        "ClaimResult": all_of(claimed | {"ack": acked} | performance, optional="ack"),
        "AckResult": all_of(
            held | {"acked": u64()} | counted | {"next": following} | performance,
            optional="reasons next",
        ),
        "NackResult": all_of(held | {"nacked": u64()} | counted | performance, optional="reasons"),
        "ExtendResult": all_of(
            held | {"extended": u64(), "deadlines": deadlines} | performance, optional="reasons"
        ),
        "RedriveResult": all_of(skipped | redriven | performance),
        "LeaseList": all_of(row | performance, optional="next_cursor"),
    }


def _other_answers() -> Schema:
    performance = {"performance": ref("Performance")}
    described = object_of(
        "code message", code=text(enum=codes_of_errors()), message=text(), detail=object_of("")
    )
    labels: Schema = {"type": "object", "additionalProperties": text()}
    labelled = object_of("labels value", labels=labels, value={"type": "number"})
    times = ("server_total_ms", "wal_append_ms", "fsync_ms", "throttle_wait_ms")
    return {
        "Performance": object_of(
            "server_total_ms",
            **{name: {"type": "number"} for name in times},
            records_scanned=u64(),
        ),
        "Error": object_of("error", error=described, performance=ref("Performance")),
        "Metrics": {
            "type": "object",
            "description": "Metrics by name, the same as in the text.",
            "properties": {"performance": ref("Performance")},
            "additionalProperties": {"anyOf": [{"type": "number"}, list_of(labelled)]},
        },
        "Health": all_of(
            {"status": {"const": "ok"}, "version": text(), "uptime_ms": u64()} | performance
        ),
        "Ready": all_of(
            {
                "status": text(enum=["ready", "degraded"]),
                "wal_replay_complete": {"const": True},
                "topics": u64(),
                "read_only_shards": list_of(u64()),
                "reasons": list_of(text()),
            }
            | performance,
            optional="read_only_shards reasons",
        ),
    }


def codes_of_errors() -> list[str]:
    """Every code of an error."""
    return [code.value for code in Code]


def _config_patch() -> Schema:
    """`TopicConfig` without defaults, each field nullable: absent fields stay unchanged."""
    config = config_schema()
    fields = {
        name: {key: value for key, value in field.items() if key != "default"}
        for name, field in config["properties"].items()
    }
    nullable = {
        name: field if name == "type" else {"anyOf": [field, {"type": "null"}]}
        for name, field in fields.items()
    }
    about = "A JSON merge patch: omitted fields stay, null gives a field its default."
    return config | {"properties": nullable, "description": about}


def ignored_members() -> Schema:
    """The list in an answer of unknown members of the body."""
    return list_of(text(maxLength=IGNORED_NAME_CHARS_MAX)) | {
        "maxItems": IGNORED_MEMBERS_MAX,
        "description": "Unknown members of the body; absent if there are none.",
    }


def all_of(properties: dict[str, Schema], optional: str = "") -> Schema:
    """An object whose properties are required, except those in `optional`."""
    missable = optional.split()
    return object_of(" ".join(name for name in properties if name not in missable), **properties)
