"""The record of a dead job, and the job of a dead letter (§10.6, redrive). Pure.

`data`, `tag`, `node` and `meta` keep their bytes. Facts about the job's end are appended to `meta`
as its last members; the redrive removes them:

    {"trace":"z9"}  ->  {"trace":"z9","$dead_letter_from":"jobs","$dead_letter_deliveries":5,
                         "$dead_letter_src_seq":480101,"$dead_letter_error":"no such file"}

`$dead_letter_error` is the reason of the last nack that gave one, and absent if no nack did. If
`meta` was absent, a space precedes the last brace, because `{}` must stay `{}`. A letter that dies
again has its new stamps after the old ones: JSON parsers take the last of equal names. A trace
stays where it is, before the rest of `meta`. Called by `queue/dispatch/dead_letter_moves`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from topics_server.values.appends import of_columns
from topics_server.values.blocks import BYTES_MARK, split_trace
from topics_server.values.model import is_topic_name
from topics_server.values.record_codecs import body_of

# The match is exact: in valid JSON, `,"$` and `{"$` occur only where a member's name begins, and
# everything from there to the last brace is on the top level of `meta`.
_STAMPED: Final = re.compile(
    rb'(,|\{[ \t\r\n]*)"\$dead_letter_from":"([A-Za-z0-9][A-Za-z0-9._:-]{0,254})",'
    rb'"\$dead_letter_deliveries":(0|[1-9][0-9]{0,18}),'
    rb'"\$dead_letter_src_seq":([1-9][0-9]{0,18})'
    rb'(?:,"\$dead_letter_error":("(?:[^"\\]|\\.)+"))?( ?)\}\Z'
)


class Letter(msgspec.Struct, frozen=True, gc=False):
    """A record as it is stored; `data` and `meta` as bytes, `meta` empty if absent."""

    data: bytes
    tag: str | None = None
    node: str | None = None
    meta: bytes = b""


class Stamps(msgspec.Struct, frozen=True, gc=False):
    """The end of a job: its queue, its deliveries, and its seq there.

    `error`: the reason, if a worker gave one.
    """

    from_topic: str
    deliveries: int
    src_seq: int
    error: str = ""


def stamp(letter: Letter, stamps: Stamps) -> Letter:
    """The dead letter that this job becomes."""
    assert is_topic_name(stamps.from_topic)
    members = (
        f'"$dead_letter_from":"{stamps.from_topic}",'
        f'"$dead_letter_deliveries":{stamps.deliveries},'
        f'"$dead_letter_src_seq":{stamps.src_seq}'
    ).encode()
    if stamps.error:
        members += b',"$dead_letter_error":' + msgspec.json.encode(stamps.error)
    trace, meta = split_trace(letter.meta)
    if not meta:
        stamped = b"{" + members + b" }"
    else:
        assert meta.lstrip(BYTES_MARK).startswith(b"{")
        assert meta.endswith(b"}")
        comma = b"," if meta[:-1].strip() != b"{" else b""
        stamped = meta[:-1] + comma + members + b"}"
    return Letter(letter.data, letter.tag, letter.node, trace + stamped)


def stamps_of(meta: bytes) -> Stamps | None:
    """The end of the job; None if this `meta` is not a dead letter's."""
    found = _find(split_trace(meta)[1])
    if found is None:
        return None
    error = msgspec.json.decode(found.group(5), type=str) if found.group(5) else ""
    return Stamps(found.group(2).decode(), int(found.group(3)), int(found.group(4)), error)


def unstamp(letter: Letter) -> Letter:
    """The job from which this dead letter came; any other record is returned unchanged."""
    trace, stamped = split_trace(letter.meta)
    found = _find(stamped)
    if found is None:
        return letter
    if found.group(6):
        meta = b""
    elif found.group(1) == b",":
        meta = stamped[: found.start()] + b"}"
    else:
        meta = found.group(1) + b"}"
    return Letter(letter.data, letter.tag, letter.node, trace + meta)


def _find(meta: bytes) -> re.Match[bytes] | None:
    """The position of the stamps: after other members, or alone."""
    found = _STAMPED.search(meta)
    if found is None:
        return None
    is_marked = bool(found.group(6))
    if found.group(1) == b",":
        return None if is_marked else found
    assert found.start() == 0, "the first brace is that of the object itself"
    return None if is_marked and found.group(1) != b"{" else found


def dead_body(dead: Iterable[tuple[Letter, Stamps]]) -> bytes:
    """The body of an append that makes dead letters of these jobs."""
    return append_body(stamp(letter, stamps) for letter, stamps in dead)


def redriven_body(letters: Iterable[Letter]) -> bytes:
    """The body of an append that turns these dead letters into jobs again."""
    return append_body(map(unstamp, letters))


def append_body(letters: Iterable[Letter]) -> bytes:
    """The body of an append of these records; `data` and `meta` keep their bytes."""
    columns = [(made.data, made.meta, made.tag, made.node) for made in letters]
    datas, metas, tags, nodes = (list(column) for column in zip(*columns, strict=True))
    return body_of(of_columns(datas, metas, tags, nodes))
