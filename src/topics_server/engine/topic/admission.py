"""The configurable limits of one append (§2).

The decoder checks syntax only, so a lowered limit never makes an old frame unreadable. Decide
refuses limits here, with the contract's codes and the path of the value in `detail.field`. The
decoder supplies the sums; a single record is examined only when its column may be over the limit.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics_server.values.appends import DecodedAppend
from topics_server.values.errors import Code, TopicsError, invalid
from topics_server.values.limits import IDEMPOTENCY_KEY_CHARS_MAX, KIB, META_KEYS_MAX, MIB

_META: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
# The most bytes of a character in UTF-8.
_CHAR_BYTES_MAX: Final = 4


class AppendLimits(msgspec.Struct, frozen=True):
    """The bounds of one append; bytes of tags and nodes are those of their UTF-8."""

    max_batch_records: int = 10_000
    max_record_bytes: int = MIB
    max_meta_bytes: int = 16 * KIB
    max_tag_bytes: int = 256
    max_node_bytes: int = 128


def check_key(key: str | None, header_key: str | None) -> str | None:
    """The valid idempotency key: the body's wins. Raises `invalid_request`."""
    field = "idempotency_key"
    if key is None:
        key, field = header_key, "Idempotency-Key"
    if key is not None and not 0 < len(key) <= IDEMPOTENCY_KEY_CHARS_MAX:
        raise invalid(f"{field} must have 1 to {IDEMPOTENCY_KEY_CHARS_MAX} characters", field)
    return key


def check_limits(decoded: DecodedAppend, limits: AppendLimits) -> None:
    """Refuse a value over a bound: batch_too_large, record_too_large, invalid_request."""
    count = decoded.count
    if count > limits.max_batch_records:
        raise TopicsError(
            Code.BATCH_TOO_LARGE,
            f"the request has {count} records; the limit is {limits.max_batch_records}",
            {"field": "records", "max_batch_records": limits.max_batch_records},
        )
    longest_meta = 0
    if decoded.has_metas:
        longest_meta = max(map(len, decoded.metas))
        _check_metas(decoded.metas, longest_meta, limits)
    if decoded.longest_bytes + longest_meta > limits.max_record_bytes:
        _check_records(decoded, limits)
    if decoded.tag_chars_max * _CHAR_BYTES_MAX > limits.max_tag_bytes:
        _check_texts(decoded.tags, "tag", limits.max_tag_bytes)
    node = decoded.batch_node
    if node is not None and len(node.encode()) > limits.max_node_bytes:
        raise invalid(f"node is longer than {limits.max_node_bytes} bytes", "node")
    if decoded.has_nodes:
        _check_texts(decoded.nodes, "node", limits.max_node_bytes)


def _check_records(decoded: DecodedAppend, limits: AppendLimits) -> None:
    for index, (data, meta) in enumerate(zip(decoded.datas, decoded.metas, strict=True)):
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
        if meta.count(b":") > META_KEYS_MAX and len(_META.decode(meta)) > META_KEYS_MAX:
            raise invalid(f"meta has more than {META_KEYS_MAX} keys", f"records[{index}].meta")


def _check_texts(texts: list[str | None], name: str, max_bytes: int) -> None:
    if max(map(len, filter(None, texts)), default=0) * _CHAR_BYTES_MAX <= max_bytes:
        return
    for index, text in enumerate(texts):
        if text and len(text.encode()) > max_bytes:
            raise invalid(f"{name} is over {max_bytes} bytes", f"records[{index}].{name}")
