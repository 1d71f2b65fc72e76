"""Finds the last records of a topic for `read --last` and `tail -n`.

The server reads forwards from a position. Because of deleted records and filters, the last N
records may begin at any distance below the head. The examined range grows downwards until it holds
N records or reaches the topic's first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from topics_server.cli.connection import ServerConnection, topic_path
from topics_server.cli.paging import pages, show_gap

# Each range is this many times as long as the range above it.
_GROWTH: Final = 4


class _State(msgspec.Struct):
    head_seq: int
    earliest_seq: int


_STATE: Final = msgspec.json.Decoder(_State)


class _Seq(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")


_SEQ: Final = msgspec.json.Decoder(_Seq)


def last_records(
    client: ServerConnection, topic: str, count: int, query: Mapping[str, Any], *, as_json: bool
) -> tuple[list[msgspec.Raw], int]:
    """Return the last `count` records (fewer if there are fewer), and the seq to continue after.

    `query` holds further fields of a diff. Gaps between the records are printed at once.
    """
    answer = client.call("GET", topic_path(topic, "?touch=false"), repeatable=True)
    state = _STATE.decode(answer)
    first, above, size = max(state.earliest_seq, 1), state.head_seq, count
    found: deque[msgspec.Raw] = deque()
    after = above
    while len(found) < count and above >= first:
        below = max(first - 1, above - size)
        records, reached = _between(client, topic, below, above, query, as_json=as_json)
        if above == state.head_seq:
            after = reached  # the last page may include records that were appended meanwhile
        found.extendleft(reversed(records))
        above, size = below, size * _GROWTH
    return list(found)[max(0, len(found) - count) :], after


def _between(
    client: ServerConnection,
    topic: str,
    below: int,
    above: int,
    query: Mapping[str, Any],
    *,
    as_json: bool,
) -> tuple[list[msgspec.Raw], int]:
    """Return the records with `below < seq <= above`, and the seq where reading ended."""
    found: list[msgspec.Raw] = []
    reached = below
    for page in pages(client, topic, below, dict(query), limit=above - below):
        if bytes(page.tombstone) != b"null":
            show_gap(page.tombstone, as_json=as_json)
        found += [record for record in page.records if _seq_of(record) <= above]
        reached = page.next_from_seq
        if reached >= above:
            break
    return found, min(reached, above)


def _seq_of(record: msgspec.Raw) -> int:
    return _SEQ.decode(record).seq
