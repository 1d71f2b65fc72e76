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
    keys, window_ms = topic.keys, topic.config.idempotency_window_ms
    names = record_keys(base, range(decoded.count))
    found = [keys.find(name, window_ms, now_ms) for name in names]
    seqs = [0 if known is None else known.first_seq for known in found]
    missing: list[int] | None = [index for index, known in enumerate(found) if known is None]
    if not missing:
        lsns = [known.staged_lsn or 0 for known in found if known is not None]
        first, last = min(seqs), max(seqs)
        return Duplicate(first, last - first + 1, max(lsns) or None, seqs)
    if len(missing) == decoded.count:
        missing = None
    chosen = msgspec.structs.replace(with_record_keys(decoded, base, missing), known_seqs=seqs)
    return chosen, keyed_body(base, missing, body)
