"""Appends that have an idempotency key for each record. Pure.

Record i of a call has the key `base:i`, in the same memory as the keys of whole calls. Such a call
appends the records whose keys are unknown, in one entry; the first payload of a key wins. Called by
`append`.
"""

from __future__ import annotations

import msgspec

from topics_server.engine.topic.dedupe import Duplicate
from topics_server.engine.topic.topic import Topic
from topics_server.values.appends import DecodedAppend, check_base_key
from topics_server.values.record_codecs import keyed_body, record_keys, with_record_keys


def missing_records(
    topic: Topic, decoded: DecodedAppend, body: bytes, header_key: str | None, now_ms: int
) -> tuple[DecodedAppend, bytes] | Duplicate:
    """The append of the records whose keys are unknown, with its body; or the original of all.

    A key of a call with several records stands for the first of them. Raises `invalid_request`
    without a base key, or if a derived one is too long.
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
