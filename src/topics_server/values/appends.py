"""Decodes the body of an append into records, and checks them against the configurable limits.

Live requests and replay use this one decoder (contract §2). It checks syntax only: JSON, types,
UTF-8, depth. `data` and `meta` stay the bytes that were sent. `check_limits` is called where a live
append is decided, so lowering a limit never makes an old frame unreadable. Any module may import
it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec

from topics_server.values.blocks import Payloads
from topics_server.values.errors import Code, TopicsError, clipped, invalid
from topics_server.values.json_shape import exceeds_depth, has_more_items
from topics_server.values.limits import (
    INLINE_CONFIG_BYTES_MAX,
    JSON_DEPTH_MAX,
    KIB,
    META_KEYS_MAX,
    MIB,
    RECORD_FRAMING_BYTES,
    TRACE_BYTES,
    U64_MAX,
)
from topics_server.values.model import (
    Discard,
    Durability,
    Guarantee,
    SentCondition,
    StreamStep,
    TopicType,
)

# Grammar 1 has no delays and skips the fields that name them. `record_codecs` holds the grammars of
# all other bodies.
PLAIN_GRAMMAR: Final = 1
GRAMMAR: Final = 2

T = TypeVar("T")
# Record index, milliseconds, and whether these are an absolute time (else a delay from the commit).
Delay = tuple[int, int, bool]

# A union with None would accept only null, so the empty value means absent.
_ABSENT: Final = msgspec.Raw(b"")
_NO_META: Final = b""
# A body up to this size may stay in memory as long as one of its values is in use.
_PINNED_BYTES_MIN: Final = 65_536
# A tag with at most this many characters is within the default limit in every encoding.
_PLAIN_TAG_CHARS_MAX: Final = 64
_SMALL_BYTES_MAX: Final = 4096
# The shortest record of an append body, with its comma: `{"data":1},`.
_RECORD_BYTES_MIN: Final = 11
# UTF-8 is checked in pieces of this size: decoding a whole body may take four times its size.
_UTF8_PIECE_BYTES: Final = 256 * KIB
# More bytes than any valid value of `idempotency` has.
_IDEMPOTENCY_BYTES_MAX: Final = 64
_CHAR_BYTES_MAX: Final = 4
# The valid words of each member of a body, by the member's name.
_WORDS: Final = {
    name: [choice.value for choice in kind]
    for name, kind in (
        ("type", TopicType),
        ("durability", Durability),
        ("discard", Discard),
        ("guarantee", Guarantee),
    )
} | {"consistency": ["eventual", "strong"], "from": ["earliest", "head"]}
# Matches one escape in a string (a surrogate pair counts as one). The number below: how many bytes
# the error message searches for half a pair.
_ESCAPES: Final = re.compile(
    rb"\\(?:u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}"
    rb"|(?P<lone>u[Dd][89A-Fa-f][0-9A-Fa-f]{2})|.)",
    re.DOTALL,
)
_SURROGATES_SOUGHT_BYTES: Final = 65_536
_FIELD_PATH: Final = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")


class _Call(msgspec.Struct, gc=False, kw_only=True):
    node: str | None = None
    idempotency_key: str | None = None
    idempotency: msgspec.Raw = _ABSENT
    create: bool | None = None
    config: msgspec.Raw = _ABSENT
    disable_backpressure: bool | None = None
    if_: msgspec.Raw = msgspec.field(default=_ABSENT, name="if")


_NO_CALL: Final = _Call()


class _PlainRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    data: msgspec.Raw
    tag: Annotated[str, msgspec.Meta(max_length=_PLAIN_TAG_CHARS_MAX)] | None = None


class _PlainBody(_Call, gc=False, kw_only=True):
    records: list[_PlainRecord]


class _SmallBody(_PlainBody, gc=False, kw_only=True):
    # A small body cannot have a large `if`, so decode it together with the rest.
    if_: SentCondition | None = msgspec.field(  # type: ignore[assignment]
        default=None, name="if"
    )


class _Uncounted(msgspec.Struct, gc=False):
    """A body whose records are checked for shape but not decoded."""

    records: msgspec.Raw = _ABSENT


class _Record(msgspec.Struct, gc=False):
    data: msgspec.Raw
    tag: str | None = None
    node: str | None = None
    meta: msgspec.Raw = _ABSENT


class _Body(_Call, gc=False, kw_only=True):
    records: list[_Record]


class _DelayedRecord(_Record, gc=False):
    delay_ms: int | None = None
    deliver_at_ms: int | None = None


class _DelayedBody(_Call, gc=False, kw_only=True):
    records: list[_DelayedRecord]


class DecodedAppend(msgspec.Struct, frozen=True, gc=False):
    """One append, decoded: four parallel columns of `count` records and the fields of the call.

    `datas` may be views into the body; length, slicing, `b"".join` and `bytes()` work on both.
    `metas[i]` is `b""` where absent; `nodes[i]` already has the batch's default, `batch_node`. Sums
    are computed once: `longest_bytes` of a `data`, `payload_bytes` of data and meta, `text_chars`
    of tags and nodes; no tag has more than `tag_chars_max` characters. `weight`: the records' share
    of `bytes`, which agrees with `blocks.record_bytes`. `has_nodes` is false if `batch_node` is the
    only node. `delays`: the few records that have a delay. `hops`: one byte a record, the number of
    routers that the record passed; empty if no record passed a router. `form`: the grammar of a
    body that is not an append body (`record_codecs`), else 0. `step`: the change of the topic's
    stream. `payloads`: the payload columns of a large append, which are made in advance.
    `condition`: the call's `if`, decoded or as it was sent. `idempotency`: that member as it was
    sent, shortened. `record_keys`: an idempotency key for each record, else empty. `known_seqs`: in
    a live append with such keys, the seq of each record of the request; 0 for the records that are
    appended now. `trace`: the `traceparent` of the call, which every `meta` begins with
    (`record_codecs.with_trace`), else empty.
    """

    datas: list[bytes]
    metas: list[bytes]
    tags: list[str | None]
    nodes: list[str | None]
    count: int
    weight: int
    longest_bytes: int
    payload_bytes: int
    text_chars: int
    tag_chars_max: int
    has_metas: bool = False
    has_nodes: bool = False
    batch_node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: bytes | None = None
    disable_backpressure: bool = False
    delays: tuple[Delay, ...] = ()
    hops: bytes = b""
    form: int = 0
    step: StreamStep | None = None
    payloads: tuple[Payloads, ...] = ()
    condition: SentCondition | bytes | None = None
    idempotency: bytes | None = None
    record_keys: tuple[str, ...] = ()
    known_seqs: list[int] | None = None
    trace: bytes = b""

    @property
    def grammar(self) -> int:
        """The oldest grammar that decodes these records from their body."""
        return self.form or (GRAMMAR if self.delays else PLAIN_GRAMMAR)

    def since(self, index: int) -> DecodedAppend:
        """The append that consists of the records from this index on."""
        new = slice(index, None)
        return of_columns(
            self.datas[new], self.metas[new], self.tags[new], self.nodes[new], hops=self.hops[new]
        )


class AppendLimits(msgspec.Struct, frozen=True):
    """The bounds of one append; bytes of tags and nodes are those of their UTF-8."""

    max_batch_records: int = 10_000
    max_record_bytes: int = MIB
    max_meta_bytes: int = 16 * KIB
    max_tag_bytes: int = 256
    max_node_bytes: int = 128


_META_KEYS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNCOUNTED_DECODER: Final = msgspec.json.Decoder(_Uncounted)
_PLAIN_DECODER: Final = msgspec.json.Decoder(_PlainBody)
_SMALL_DECODER: Final = msgspec.json.Decoder(_SmallBody)
_DECODER: Final = msgspec.json.Decoder(_Body)
_DELAYED_DECODER: Final = msgspec.json.Decoder(_DelayedBody)


def decode_append(
    body: bytes, grammar: int = GRAMMAR, max_records: int | None = None
) -> DecodedAppend:
    """Decode an append body: requests use the newest grammar, each frame names its own.

    `max_records`: refuse a body with more records before any record is built. Raises `TopicsError`:
    `batch_too_large`, or `invalid_request` with the path of a wrong type in `detail.field`.
    """
    if max_records is not None and len(body) > _RECORD_BYTES_MIN * max_records:
        _check_count(body, max_records)
    try:
        plain: _PlainBody
        plain = (_SMALL_DECODER if len(body) <= _SMALL_BYTES_MAX else _PLAIN_DECODER).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The body has other fields than data and short tags, or an error: decode it with the full
        # grammar.
        return _decode_full(body, grammar)
    if not body.isascii():
        check_utf8(body)
    records, node = plain.records, plain.node
    count = len(records)
    # No function call per record: most requests have one record and none of the rare fields below.
    if count == 1:
        data, tag = records[0].data, records[0].tag
        datas: list[bytes] = [data]
        tags = [tag]
        payload_bytes = longest_bytes = len(data)
        text_chars = len(tag) if tag else 0
    else:
        datas = [record.data for record in records]
        tags = [record.tag for record in records]
        sizes = list(map(len, datas))
        payload_bytes, longest_bytes = sum(sizes), max(sizes, default=0)
        text_chars = chars_of(tags)
    if node:
        text_chars += len(node) * count
    metas = [_NO_META] * count
    # A value of depth n has at least 2n bytes: short values need no check.
    if longest_bytes > 2 * JSON_DEPTH_MAX:
        _check_depths(datas, metas)
    if len(body) > _PINNED_BYTES_MIN:
        datas = _unpinned(datas, body, payload_bytes)
    return DecodedAppend(
        datas,
        metas,
        tags,
        [node] * count,
        count,
        RECORD_FRAMING_BYTES * count + payload_bytes + text_chars,
        longest_bytes,
        payload_bytes,
        text_chars,
        _PLAIN_TAG_CHARS_MAX,
        False,
        False,
        node,
        plain.idempotency_key,
        plain.create,
        None if plain.config is _ABSENT else _config_of(plain),
        bool(plain.disable_backpressure),
        condition=plain.if_ if isinstance(plain, _SmallBody) else _if_of(plain),
        idempotency=None if plain.idempotency is _ABSENT else _idempotency_of(plain),
    )


def _check_count(body: bytes, max_records: int) -> None:
    """Raise `batch_too_large` for too many records; the decoder reports every other error."""
    # One brace opens the body, and one opens each record.
    if body.count(b"{") <= max_records + 1:
        return
    try:
        records = _UNCOUNTED_DECODER.decode(body).records
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    # Anything but an array is a wrong type; the decoder reports it.
    if bytes(memoryview(records)[:1]) == b"[" and has_more_items(records, max_records):
        raise batch_too_large(max_records)


def batch_too_large(max_records: int) -> TopicsError:
    """The error for an append with too many records."""
    return TopicsError(
        Code.BATCH_TOO_LARGE,
        f"there are more than {max_records} records",
        {"field": "records", "max_batch_records": max_records},
    )


def _decode_full(body: bytes, grammar: int = GRAMMAR) -> DecodedAppend:
    decoded: _Body | _DelayedBody
    delays: tuple[Delay, ...] = ()
    if grammar == PLAIN_GRAMMAR or not _may_delay(body):
        decoded = decode_json(_DECODER, body)
    else:
        decoded = decode_json(_DELAYED_DECODER, body)
        delays = _delays_of(decoded.records)
    records, node = decoded.records, decoded.node
    metas = [_NO_META if record.meta is _ABSENT else bytes(record.meta) for record in records]
    for index, meta in enumerate(metas):
        if meta:
            metas[index] = _checked_meta(meta, index)
    # These are views into the body; they are copied once, when a block is made.
    datas: list[bytes] = [record.data for record in records]
    _check_depths(datas, metas)
    return of_columns(
        _unpinned(datas, body, sum(map(len, datas))),
        metas,
        [record.tag for record in records],
        [node if record.node is None else record.node for record in records],
        decoded,
        delays,
    )


def _may_delay(body: bytes) -> bool:
    """Whether a field name may be a delay in any spelling. Searching for one byte is fast."""
    return (b"_" in body and b"_ms" in body) or (b"\\" in body and b"\\u" in body)


def _delays_of(records: list[_DelayedRecord]) -> tuple[Delay, ...]:
    found: list[Delay] = []
    for index, record in enumerate(records):
        delay_ms, at_ms = record.delay_ms, record.deliver_at_ms
        if delay_ms is None and at_ms is None:
            continue
        path = f"records[{index}]"
        if delay_ms is not None and at_ms is not None:
            raise invalid("give delay_ms or deliver_at_ms, not both", f"{path}.delay_ms")
        if delay_ms is not None:
            found.append((index, _checked_u64(delay_ms, f"{path}.delay_ms"), False))
        elif at_ms is not None:
            found.append((index, _checked_u64(at_ms, f"{path}.deliver_at_ms"), True))
    return tuple(found)


def _checked_u64(value: int, path: str) -> int:
    if not 0 <= value <= U64_MAX:
        raise invalid(f"expected an integer from 0 to {U64_MAX}", path)
    return value


def of_columns(
    datas: list[bytes],
    metas: list[bytes],
    tags: list[str | None],
    nodes: list[str | None],
    call: _Call = _NO_CALL,
    delays: tuple[Delay, ...] = (),
    hops: bytes = b"",
) -> DecodedAppend:
    """Make the append of these records, and compute its sums."""
    assert len(hops) in (0, len(datas))
    assert len(datas) == len(metas) == len(tags) == len(nodes)
    count = len(datas)
    payload_bytes = sum(map(len, datas)) + sum(map(len, metas))
    text_chars = chars_of(tags) + chars_of(nodes)
    return DecodedAppend(
        datas=datas,
        metas=metas,
        tags=tags,
        nodes=nodes,
        count=count,
        weight=RECORD_FRAMING_BYTES * count + payload_bytes + text_chars,
        longest_bytes=max(map(len, datas), default=0),
        payload_bytes=payload_bytes,
        text_chars=text_chars,
        tag_chars_max=max((len(tag) for tag in tags if tag), default=0),
        has_metas=any(metas),
        has_nodes=any(nodes),
        batch_node=call.node,
        idempotency_key=call.idempotency_key,
        create=call.create,
        config=_config_of(call),
        disable_backpressure=bool(call.disable_backpressure),
        condition=_if_of(call),
        idempotency=None if call.idempotency is _ABSENT else _idempotency_of(call),
        delays=delays,
        hops=hops,
    )


def chars_of(texts: Sequence[str | None]) -> int:
    """The number of characters in a column; one C call if all texts are set, or none."""
    if texts and texts[0] is None and texts.count(None) == len(texts):
        return 0
    try:
        return len("".join(texts))  # type: ignore[arg-type]
    except TypeError:
        return len("".join(filter(None, texts)))


def _unpinned(datas: list[bytes], body: bytes, data_bytes: int) -> list[bytes]:
    """Copy the data if they are a small part of the body: views would keep the whole body."""
    if len(body) > _PINNED_BYTES_MIN and len(body) > 2 * data_bytes:
        return [bytes(data) for data in datas]
    return datas


def _config_of(call: _Call) -> bytes | None:
    config = call.config
    if config is _ABSENT:
        return None
    if len(config) > INLINE_CONFIG_BYTES_MAX:
        raise invalid(f"config is over {INLINE_CONFIG_BYTES_MAX} bytes", "config")
    raw = bytes(config)
    return None if raw == b"null" else raw


def _if_of(call: _Call) -> bytes | None:
    return None if call.if_ is _ABSENT else bytes(call.if_)


def _idempotency_of(call: _Call) -> bytes:
    return bytes(memoryview(call.idempotency)[:_IDEMPOTENCY_BYTES_MAX])


def check_utf8(body: bytes) -> None:
    """Raise `invalid_request` for bad UTF-8: msgspec does not check skipped strings."""
    if body.isascii():
        return
    start, size = 0, len(body)
    while start < size:
        end = min(start + _UTF8_PIECE_BYTES, size)
        for _ in range(_CHAR_BYTES_MAX - 1):
            # End the piece at a character boundary.
            if end < size and body[end] & 0xC0 == 0x80:
                end -= 1
        try:
            body[start:end].decode()
        except UnicodeDecodeError as error:
            raise invalid(f"body is not valid UTF-8 (byte {start + error.start})") from None
        start = end


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode any request body; raises `invalid_request` for bad UTF-8, syntax, types or depth."""
    if not body.isascii():
        check_utf8(body)
    try:
        value = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except msgspec.DecodeError as error:
        raise not_json(error, body) from None
    except RecursionError:
        raise _too_deep(None) from None
    return value


def not_json(error: msgspec.DecodeError, body: bytes) -> TopicsError:
    """The error for a body that the decoder refuses; reports half a surrogate pair as such."""
    for escape in _ESCAPES.finditer(body, 0, _SURROGATES_SOUGHT_BYTES):
        if escape.lastgroup == "lone":
            shown = escape[0].decode("ascii")
            return invalid(
                f"body has a lone surrogate, which is not a character: {shown} "
                f"(byte {escape.start()})"
            )
    if not body.strip():
        return invalid("the body is empty; it must be a JSON object")
    return invalid(f"body is not valid JSON: {error}")


def _wrong_type(message: str) -> TopicsError:
    found = _FIELD_PATH.search(message)
    missing = re.search(r"missing required field `([^`]+)`", message)
    path = found.group(1) if found else ""
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
    # Cut the message here: the rest may repeat an unknown word of the body.
    what = clipped(message[: found.start()] if found else message)
    where = found.group().replace("$.", "") if found else ""
    words = _WORDS.get(path.rpartition(".")[2]) if what.startswith("Invalid enum value") else None
    choice = f"; one of {', '.join(words)}" if words else ""
    return invalid(what + where + choice, path or None)


def _checked_meta(meta: bytes, index: int) -> bytes:
    """`meta` as it was sent; an explicit null counts as absent."""
    if meta.startswith(b"{"):
        return meta
    if meta == b"null":
        return b""
    raise invalid("meta must be an object", f"records[{index}].meta")


def _check_depths(datas: list[bytes], metas: list[bytes]) -> None:
    for name, values in (("data", datas), ("meta", metas)):
        for index, value in enumerate(values):
            if len(value) > 2 * JSON_DEPTH_MAX and exceeds_depth(value):
                raise _too_deep(f"records[{index}].{name}")


def _too_deep(field: str | None) -> TopicsError:
    return invalid(f"JSON is nested deeper than {JSON_DEPTH_MAX} levels", field)


# -- limits ----------------------------------------------------------------------------------------


def check_limits(decoded: DecodedAppend, limits: AppendLimits) -> None:
    """Refuse a value over a bound: batch_too_large, record_too_large, invalid_request.

    The path of the value is in `detail.field`. Single records are examined only if the sums of
    their column allow a value over the bound.
    """
    count = decoded.count
    if count > limits.max_batch_records:
        raise TopicsError(
            Code.BATCH_TOO_LARGE,
            f"the request has {count} records; the limit is {limits.max_batch_records}",
            {"field": "records", "max_batch_records": limits.max_batch_records},
        )
    longest_meta = 0
    metas = decoded.metas
    if decoded.has_metas:
        if decoded.trace:
            # The trace does not count: the limits are for what the client sent.
            metas = [meta[TRACE_BYTES:] for meta in metas]
        longest_meta = max(map(len, metas))
        _check_metas(metas, longest_meta, limits)
    if decoded.longest_bytes + longest_meta > limits.max_record_bytes:
        _check_records(decoded.datas, metas, limits)
    if decoded.tag_chars_max * _CHAR_BYTES_MAX > limits.max_tag_bytes:
        _check_texts(decoded.tags, "tag", limits.max_tag_bytes)
    node = decoded.batch_node
    if node is not None and len(node.encode()) > limits.max_node_bytes:
        raise invalid(f"node is longer than {limits.max_node_bytes} bytes", "node")
    if decoded.has_nodes:
        _check_texts(decoded.nodes, "node", limits.max_node_bytes)


def _check_records(datas: list[bytes], metas: list[bytes], limits: AppendLimits) -> None:
    for index, (data, meta) in enumerate(zip(datas, metas, strict=True)):
        if len(data) + len(meta) > limits.max_record_bytes:
            raise TopicsError(
                Code.RECORD_TOO_LARGE,
                f"data and meta of the record have more than {limits.max_record_bytes} bytes",
                {"field": f"records[{index}]", "max_record_bytes": limits.max_record_bytes},
            )


def _check_metas(metas: list[bytes], longest: int, limits: AppendLimits) -> None:
    if longest > limits.max_meta_bytes:
        index = next(i for i, meta in enumerate(metas) if len(meta) > limits.max_meta_bytes)
        raise invalid(
            f"meta is larger than {limits.max_meta_bytes} bytes", f"records[{index}].meta"
        )
    # The shortest object with this many keys has five bytes a key: `"":0,`.
    if longest <= 5 * META_KEYS_MAX:
        return
    for index, meta in enumerate(metas):
        if meta.count(b":") > META_KEYS_MAX and len(_META_KEYS.decode(meta)) > META_KEYS_MAX:
            raise invalid(f"meta has more than {META_KEYS_MAX} keys", f"records[{index}].meta")


def _check_texts(texts: list[str | None], name: str, max_bytes: int) -> None:
    if max(map(len, filter(None, texts)), default=0) * _CHAR_BYTES_MAX <= max_bytes:
        return
    for index, text in enumerate(texts):
        if text and len(text.encode()) > max_bytes:
            raise invalid(f"{name} is over {max_bytes} bytes", f"records[{index}].{name}")
