"""Requests on the records and consumers of a topic, as values, with decoders of the answers.

Pure; `topic` and `async_topic` perform them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from topics_server.client.addresses import segment
from topics_server.client.calls import Call, QueueAddress, reader, traced
from topics_server.client.values import plain


class NewRecord(msgspec.Struct, frozen=True):
    """A record to append; `data` is any JSON value."""

    data: Any
    tag: str | None = None
    node: str | None = None
    meta: dict[str, Any] | None = None


class AppendResult(msgspec.Struct, frozen=True):
    """Where records are stored. `condition` is `met` for an append with `if_`.

    `seqs`: the seq of each record, for an append with a key for each record.
    """

    first_seq: int
    last_seq: int
    head_seq: int
    created: bool = False
    deduped: bool = False
    condition: str | None = None
    seqs: list[int] | None = None


class StoredRecord(msgspec.Struct, frozen=True):
    """A record of a topic; `raw` and `raw_meta` are its data and meta as stored.

    With `encoding` "base64", the data holds bytes of a stream of this `content_type`. `trace`: the
    `traceparent` of its append.
    """

    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")
    raw: msgspec.Raw = msgspec.field(name="data")
    tag: str | None = msgspec.field(name="$tag", default=None)
    node: str | None = msgspec.field(name="$node", default=None)
    raw_meta: msgspec.Raw = msgspec.field(name="meta", default=msgspec.Raw(b"{}"))
    encoding: str | None = msgspec.field(name="$encoding", default=None)
    content_type: str | None = msgspec.field(name="$content_type", default=None)
    trace: str | None = msgspec.field(name="$trace", default=None)

    @property
    def data(self) -> Any:
        """The data, decoded."""
        return plain(self.raw)

    @property
    def meta(self) -> dict[str, Any]:
        """The decoded `meta`; empty without one."""
        found: dict[str, Any] = plain(self.raw_meta)
        return found


class RecordsPage(msgspec.Struct, frozen=True):
    """Records of a topic. `tombstone` reports lost records before them.

    `epoch`: the topic's incarnation, which changes when the topic is dropped and created again.
    """

    records: list[StoredRecord]
    next_from_seq: int
    head_seq: int
    caught_up: bool
    tombstone: dict[str, Any] | None = None
    epoch: int = 0


class Hold(msgspec.Struct, frozen=True):
    """How far a topic may grow beyond its caps for a consumer that is behind."""

    max_records: int
    max_bytes: int


class ConsumerPlace(msgspec.Struct, frozen=True):
    """The state of a consumer. `created` and `moved`: what the call has changed.

    `held_records`: the records that only the consumer's `hold` keeps.
    """

    consumer: str
    seq: int
    head_seq: int
    lag: int
    lag_ms: int
    created: bool = False
    moved: bool = False
    hold: Hold | None = None
    held_records: int = 0


class _Deleted(msgspec.Struct):
    deleted: bool


_read_stored: Final = reader(AppendResult)
_read_page: Final = reader(RecordsPage)
_read_place: Final = reader(ConsumerPlace)
_read_deleted: Final = reader(_Deleted)


def append(
    where: QueueAddress,
    records: Sequence[NewRecord],
    *,
    if_: Mapping[str, Any] | None,
    key: str,
    per_record: bool,
    create: bool | None,
    traceparent: str | None = None,
) -> Call[AppendResult]:
    """Append records, all or none, if `condition` holds.

    `per_record`: each record has its own key, derived from `key`; only records with an unknown key
    are stored.
    """
    if not records:
        raise ValueError("there is no record to append")
    sent = [
        {name: value for name, value in msgspec.structs.asdict(record).items() if value is not None}
        | {"data": record.data}
        for record in records
    ]
    body: dict[str, Any] = {"records": sent, "idempotency_key": key}
    if if_ is not None:
        body["if"] = dict(if_)
    if create is not None:
        body["create"] = create
    if per_record:
        body["idempotency"] = "per_record"
    asked = "" if per_record else "?return_seqs=false"
    return traced(_call("POST", where.path(asked), body, _read_stored), traceparent)


def read(where: QueueAddress, fields: Mapping[str, Any], wait_ms: int) -> Call[RecordsPage]:
    """One page of records."""
    body = {name: value for name, value in fields.items() if value is not None}
    body["include_tags"] = True
    if wait_ms:
        body["wait_ms"] = wait_ms
    call = _call("POST", where.path("/diff"), body, _read_page)
    return msgspec.structs.replace(call, wait_ms=wait_ms)


def put_consumer(
    where: QueueAddress, consumer: str, start: int | str, hold: Hold | UnsetType | None = UNSET
) -> Call[ConsumerPlace]:
    """Make a consumer.

    An existing consumer keeps its position, and gets `hold` unless that is unset.
    """
    body: dict[str, Any] = {"from": start}
    if hold is not UNSET:
        body["hold"] = hold
    return _call("PUT", _consumer(where, consumer), body, _read_place)


def get_consumer(where: QueueAddress, consumer: str) -> Call[ConsumerPlace]:
    """The state of a consumer."""
    path = _consumer(where, consumer)
    return Call(method="GET", path=path, body=None, read=_read_place, repeatable=True)


def commit(
    where: QueueAddress, consumer: str, seq: int, *, rewind: bool, if_seq: int | None
) -> Call[ConsumerPlace]:
    """Commit a seq. A commit with `if_seq` or `rewind` is not repeated automatically."""
    body: dict[str, Any] = {"seq": seq}
    if rewind:
        body["rewind"] = True
    if if_seq is not None:
        body["if_seq"] = if_seq
    call = _call("POST", _consumer(where, consumer, "/commit"), body, _read_place)
    return msgspec.structs.replace(call, repeatable=not rewind and if_seq is None)


def delete_consumer(where: QueueAddress, consumer: str) -> Call[bool]:
    """Forget a consumer; the result is whether it existed."""

    def was_there(answer: bytes) -> bool:
        return _read_deleted(answer).deleted

    path = _consumer(where, consumer)
    return Call(method="DELETE", path=path, body=None, read=was_there, repeatable=True)


def _consumer(where: QueueAddress, consumer: str, rest: str = "") -> str:
    return where.path(f"/consumers/{segment(consumer)}{rest}")


def _call(method: str, path: str, body: Mapping[str, Any], read: Any) -> Call[Any]:
    text = msgspec.json.encode(body)
    return Call(method=method, path=path, body=text, read=read, repeatable=True)
