"""The append body's grammar, versioned: request bytes -> records with raw `data` and `meta`.

The one decoder for live requests and for replay (contract §2). It knows grammar only: JSON syntax,
types, UTF-8, depth. Configurable limits are checked in decide, so that a lowered limit never makes
an old frame unreadable. `data` and `meta` stay the bytes that were sent. Everybody may import it.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from topics_server.errors import TopicsError, invalid
from topics_server.limits import JSON_DEPTH_MAX

GRAMMAR: Final = 1

T = TypeVar("T")

# A union with None would take nothing but null: absence is the empty value.
_ABSENT: Final = msgspec.Raw(b"")
_NO_META: Final = b""
# A body up to this size may be kept for whatever it carries.
_PINNED_BYTES_MIN: Final = 65_536
_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_FIELD_PATH: Final = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")


class _Record(msgspec.Struct, gc=False):
    data: msgspec.Raw
    tag: str | None = None
    node: str | None = None
    meta: msgspec.Raw = _ABSENT


class _Body(msgspec.Struct, gc=False):
    records: list[_Record]
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: msgspec.Raw = _ABSENT
    disable_backpressure: bool | None = None


class DecodedAppend(msgspec.Struct, frozen=True, gc=False):
    """One append, decoded: four parallel columns of `count` records and the call's own fields.

    `datas` may be views into the body (length, slicing by `b"".join` and `bytes()` work alike).
    `longest_bytes`: of the longest `data`.

    `metas[i]` is `b""` where absent; `nodes[i]` already has the batch's default, `batch_node`.
    """

    datas: list[bytes]
    metas: list[bytes]
    tags: list[str | None]
    nodes: list[str | None]
    longest_bytes: int = 0
    batch_node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: bytes | None = None
    disable_backpressure: bool = False

    @property
    def count(self) -> int:
        """How many records the call carries."""
        return len(self.datas)


_DECODER: Final = msgspec.json.Decoder(_Body)


def decode_append(body: bytes) -> DecodedAppend:
    """Decode an append body (grammar version 1).

    Raises `TopicsError` `invalid_request` with the path of a wrong type in `detail.field`.
    """
    decoded = decode_json(_DECODER, body)
    records = decoded.records
    node = decoded.node
    metas = [_NO_META if record.meta is _ABSENT else bytes(record.meta) for record in records]
    # Views into the body: copied once, when a block is made of them.
    datas: list[bytes] = [record.data for record in records]
    longest_bytes = max(map(len, datas), default=0)
    if len(body) > _PINNED_BYTES_MIN and len(body) > 2 * sum(map(len, datas)):
        # A body that is mostly something else must not be kept for a few bytes of it.
        datas = [bytes(data) for data in datas]
    longest_meta = 0
    if metas.count(_NO_META) != len(metas):
        longest_meta = max(map(len, metas))
        for index, meta in enumerate(metas):
            if meta:
                metas[index] = _checked_meta(meta, index)
    # A value of depth n has at least 2n bytes: short values need no look.
    if max(longest_bytes, longest_meta) > 2 * JSON_DEPTH_MAX:
        _check_depths(datas, metas)
    assert len(datas) == len(metas)
    config = bytes(decoded.config)
    return DecodedAppend(
        datas=datas,
        metas=metas,
        tags=[record.tag for record in records],
        nodes=[node if record.node is None else record.node for record in records],
        longest_bytes=longest_bytes,
        batch_node=node,
        idempotency_key=decoded.idempotency_key,
        create=decoded.create,
        config=None if config in (b"", b"null") else config,
        disable_backpressure=bool(decoded.disable_backpressure),
    )


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode any request body; raises `invalid_request` for bad UTF-8, syntax, types or depth."""
    try:
        # msgspec does not check UTF-8 inside the strings it skips.
        body.decode()
        value = decoder.decode(body)
    except UnicodeDecodeError as error:
        raise invalid(f"body is not valid UTF-8 (byte {error.start})") from None
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except msgspec.DecodeError as error:
        raise invalid(f"body is not valid JSON: {error}") from None
    except RecursionError:
        raise _too_deep(None) from None
    return value


def _wrong_type(message: str) -> TopicsError:
    found = _FIELD_PATH.search(message)
    missing = re.search(r"missing required field `([^`]+)`", message)
    path = found.group(1) if found else ""
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
    return invalid(message.replace("$.", ""), path or None)


def _checked_meta(meta: bytes, index: int) -> bytes:
    """`meta` as it was sent; an explicit null is as good as absent."""
    if meta.startswith(b"{"):
        return meta
    if meta == b"null":
        return b""
    raise invalid("meta must be an object", f"records[{index}].meta")


def _check_depths(datas: list[bytes], metas: list[bytes]) -> None:
    for name, values in (("data", datas), ("meta", metas)):
        for index, value in enumerate(values):
            if len(value) > 2 * JSON_DEPTH_MAX and exceeds_depth(bytes(value)):
                raise _too_deep(f"records[{index}].{name}")


def _too_deep(field: str | None) -> TopicsError:
    return invalid(f"JSON is nested deeper than {JSON_DEPTH_MAX} levels", field)


def exceeds_depth(value: bytes) -> bool:
    """Whether valid JSON nests deeper than `JSON_DEPTH_MAX`; `[]` is one level. Exact."""
    if value.count(b"[") + value.count(b"{") <= JSON_DEPTH_MAX:
        return False
    brackets = _STRINGS.sub(b"", value).translate(None, _NOT_BRACKETS)
    depth = deepest = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    assert depth == 0, "brackets of valid JSON balance"
    return deepest > JSON_DEPTH_MAX
