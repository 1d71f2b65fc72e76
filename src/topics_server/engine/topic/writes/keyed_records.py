"""Idempotency keys of appends, and appends that have one for each record. Pure.

Record i of a call has the key `base:i`, which is stored like the keys of whole calls. Such a call
appends the records whose keys are unknown, in one entry; the first payload of a key wins. Called by
`append`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from topics_server.engine.topic.dedupe import Duplicate
from topics_server.engine.topic.topic import Topic
from topics_server.values.appends import DecodedAppend
from topics_server.values.errors import invalid
from topics_server.values.limits import IDEMPOTENCY_KEY_CHARS_MAX
from topics_server.values.record_codecs import keyed_body, record_keys, with_record_keys

_IDEMPOTENCY_DECODER: Final = msgspec.json.Decoder(Literal["per_record"] | None)


def check_key(key: str | None, header_key: str | None) -> str | None:
    """The checked idempotency key; the body's key wins. Raises `invalid_request`."""
    field = "idempotency_key"
    if key is None:
        key, field = header_key, "Idempotency-Key"
    if key is not None and not 0 < len(key) <= IDEMPOTENCY_KEY_CHARS_MAX:
        raise invalid(f"{field} must have 1 to {IDEMPOTENCY_KEY_CHARS_MAX} characters", field)
    return key


def is_per_record(idempotency: bytes) -> bool:
    """Whether a call's `idempotency` requests a key for each record. Raises `invalid_request`."""
    try:
        sent = _IDEMPOTENCY_DECODER.decode(idempotency)
    except msgspec.DecodeError:
        raise invalid("idempotency must be per_record", "idempotency") from None
    return sent is not None


def check_base_key(key: str | None, header_key: str | None, count: int) -> str:
    """The base of the keys of `count` records, checked. Raises `invalid_request`."""
    field = "idempotency_key" if key is not None else "Idempotency-Key"
    base = check_key(key, header_key)
    if base is None:
        raise invalid("idempotency: per_record needs an idempotency key", "idempotency_key")
    suffix = f":{count - 1}"
    if len(base) + len(suffix) > IDEMPOTENCY_KEY_CHARS_MAX:
        raise invalid(
            f"{field} and the suffix {suffix} of the last record have more than "
            f"{IDEMPOTENCY_KEY_CHARS_MAX} characters",
            field,
        )
    return base


def missing_records(
    topic: Topic, decoded: DecodedAppend, body: bytes, header_key: str | None, now_ms: int
) -> tuple[DecodedAppend, bytes] | Duplicate:
    """The append of the records with unknown keys, and its body; or the original of all.

    The key of a whole call with several records stands for the first of them. Raises
    `invalid_request` without a base key, or if a derived one is too long.
    """
    base = check_base_key(decoded.idempotency_key, header_key, decoded.count)
    names = record_keys(base, range(decoded.count))
    window_ms = topic.config.idempotency_window_ms
    seqs, last_lsn = topic.keys.find_each(names, window_ms, now_ms)
    missing: list[int] | None = [index for index, seq in enumerate(seqs) if not seq]
    if not missing:
        first, last = min(seqs), max(seqs)
        return Duplicate(first, last - first + 1, last_lsn or None, seqs)
    if len(missing) == decoded.count:
        missing = None
    chosen = msgspec.structs.replace(with_record_keys(decoded, base, missing), known_seqs=seqs)
    return chosen, keyed_body(base, missing, body)
