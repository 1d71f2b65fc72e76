"""The operations of consumers, and their schemas. Pure.

Used by `api/openapi/document`.
"""

from __future__ import annotations

from topics_server.api.openapi.operations import (
    READS,
    TAKES_BODY,
    WRITES,
    answer,
    in_path,
    operation,
    page_queries,
)
from topics_server.api.openapi.schemas import (
    Schema,
    all_of,
    boolean,
    ignored_members,
    list_of,
    object_of,
    ref,
    text,
    u64,
)
from topics_server.values.errors import Code

_NONE = (Code.TOPIC_NOT_FOUND, Code.CONSUMER_NOT_FOUND)
_WORKS = ("read", "write")


def consumer_schemas() -> Schema:
    """The schemas that only consumers use."""
    hold = object_of(
        "max_records max_bytes",
        max_records=u64("All records of the topic, at most.", minimum=1),
        max_bytes=u64("Their bytes, at most.", minimum=1),
    )
    place: dict[str, Schema] = {
        "topic": text(),
        "consumer": text(),
        "seq": u64("The reader has finished every record up to it."),
        "head_seq": u64(),
        "earliest_seq": u64(),
        "lag": u64("Seqs behind its own."),
        "lag_ms": u64("Age of the first record that it has not finished; 0 if there is none."),
        "created_ts": u64(),
        "committed_ts": u64("Time of its creation, or of its last commit."),
        "last_seen_ts": u64("Time of its last call; after a restart that of its last commit."),
        "epoch": u64(),
        "hold": {"anyOf": [hold, {"type": "null"}], "description": "What caps leave to it."},
        "held_records": u64("Records that are there only because of its hold."),
    }
    performance: dict[str, Schema] = {"performance": ref("Performance")}
    ignored = {"ignored": ignored_members()}
    gone = {"topic": text(), "consumer": text(), "deleted": boolean()}
    page = {"topic": text(), "consumers": list_of(all_of(place)), "next_cursor": text()}
    start: Schema = {
        "anyOf": [text(enum=["earliest", "head"]), u64("Behind this seq; at most the head.")],
        "default": "earliest",
        "description": "Where a new consumer begins; one that exists stays where it is.",
    }
    return {
        "ConsumerRequest": object_of(
            "",
            **{
                "from": start,
                "hold": {
                    "anyOf": [hold, {"type": "null"}],
                    "description": "Caps with `discard: old` wait for the consumer until the topic "
                    "has this size; needs `admin`. Null: they do not. Without this member the hold "
                    "stays as it is.",
                },
            },
        ),
        "CommitRequest": object_of(
            "seq",
            seq=u64("At most the head."),
            rewind=boolean(False, "Whether the consumer may go back."),
            if_seq={
                "anyOf": [u64(), {"type": "null"}],
                "description": "Only if the consumer is at this seq; otherwise 409.",
            },
        ),
        "Consumer": all_of(place | performance),
        "ConsumerPutResult": all_of(
            place | {"created": boolean()} | ignored | performance, optional="ignored"
        ),
        "CommitResult": all_of(
            place | {"moved": boolean()} | ignored | performance, optional="ignored"
        ),
        "ConsumerList": all_of(page | performance, optional="next_cursor"),
        "ConsumerDropResult": all_of(gone | performance),
    }


def consumer_paths(topic: Schema) -> Schema:
    """The paths of consumers; `topic` is the parameter of the topic's name."""
    about = "A consumer's name, case-sensitive."
    consumer = in_path("consumer", "^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$", about)
    base = "/v0/topics/{topic}/consumers"
    both: Schema = {"parameters": [topic, consumer]}
    listing = operation(
        "listConsumers",
        "The consumers of a topic in name order, one page at a time.",
        {"200": answer("A page of consumers.", ref("ConsumerList"))},
        tag="records",
        scopes=("read",),
        codes=(*READS, Code.TOPIC_NOT_FOUND),
        parameters=page_queries(),
    )
    put = operation(
        "putConsumer",
        "Make a consumer: a named, durable cursor of a reader.",
        {
            "200": answer("It was there.", ref("ConsumerPutResult")),
            "201": answer("It was created.", ref("ConsumerPutResult")),
        },
        tag="records",
        scopes=_WORKS,
        codes=(*WRITES, *TAKES_BODY, Code.TOPIC_NOT_FOUND),
        body=ref("ConsumerRequest"),
        is_body_required=False,
    )
    get = operation(
        "getConsumer",
        "Where a consumer is, and how far behind the head.",
        {"200": answer("The consumer.", ref("Consumer"))},
        tag="records",
        scopes=("read",),
        codes=(*READS, *_NONE),
    )
    delete = operation(
        "dropConsumer",
        "Forget a consumer.",
        {"200": answer("It is gone.", ref("ConsumerDropResult"))},
        tag="records",
        scopes=_WORKS,
        codes=(*WRITES, Code.TOPIC_NOT_FOUND),
    )
    commit = operation(
        "commitConsumer",
        "Commit a seq: the reader has finished every record up to it.",
        {"200": answer("Where the consumer is now.", ref("CommitResult"))},
        tag="records",
        scopes=_WORKS,
        codes=(*WRITES, *TAKES_BODY, *_NONE, Code.CONDITION_FAILED),
        body=ref("CommitRequest"),
    )
    return {
        base: {"parameters": [topic], "get": listing},
        f"{base}/{{consumer}}": both | {"delete": delete, "put": put, "get": get},
        f"{base}/{{consumer}}/commit": both | {"post": commit},
    }
