"""Turns a line of a file or a record of another server into a record to append. Pure.

An imported record gets a new seq and a new time. Its `meta` stores its origin:

    {"trace":"z9"}  ->  {"$imported":{"from":"file:1c9…","line":7,"seq":9,"ts":1748450001000},
                         "trace":"z9"}

`from` names the source, `line` the line of a file, `seq` and `ts` are those at the source (absent
if the line has none). A record of bytes, which an export and a diff show as Base64, keeps
`encoding` and `content_type` there, a record with a trace keeps `trace`. A record that was imported
before keeps its earlier stamp as `before`. All other bytes of `data` and `meta` stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec import Raw

from topics_server.cli.data.cutting import BadLine, Cut, Cutter, Shape

STAMP: Final = "$imported"
# Members that a record's line may have. Members that begin with "$" are allowed and ignored, too.
_PLAIN: Final = frozenset({"data", "tag", "node", "meta", "topic"})
_TIME_MAX: Final = 2**53 - 1
_encode: Final = msgspec.json.Encoder().encode
_members: Final = msgspec.json.Decoder(dict[str, Raw])


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of `$imported`, with its members in this order."""

    source: str = msgspec.field(name="from")
    line: int | None = None
    seq: int | None = None
    ts: int | None = None
    encoding: str | None = None
    content_type: str | None = None
    trace: str | None = None
    before: Raw | None = None

    @property
    def position(self) -> int:
        """The position in the source: the line in a file, or else the seq."""
        return self.line or self.seq or 0


class Stamped(msgspec.Struct, frozen=True, gc=False):
    """A record to append; `text` is its JSON. `seq`, `ts`: those at the source."""

    text: bytes
    seq: int | None
    ts: int | None


class GapLine(msgspec.Struct, frozen=True):
    """A line `{"tombstone":…}`, which `topics read` prints in place of lost records."""

    first: int
    last: int
    reason: str


class _Tombstone(msgspec.Struct):
    gap_from: int
    gap_to: int
    reason: str = ""


_TOMBSTONE: Final = msgspec.json.Decoder(_Tombstone)


def stamped_meta(meta: bytes | None, origin: Origin) -> bytes:
    """`meta` with the origin as its first member."""
    inner = b"" if meta is None else meta.strip()[1:-1].strip()
    # The name may be spelled with escapes, in other bytes.
    if inner and (b'imported"' in inner or b"\\u" in inner):
        members = _members.decode(meta or b"{}")
        if STAMP in members:
            origin = msgspec.structs.replace(origin, before=members.pop(STAMP))
            inner = _encode(members)[1:-1]
    return b'{"$imported":' + _encode(origin) + (b"," + inner if inner else b"") + b"}"


def stamped_record(members: Mapping[str, Raw], source: str, line: int | None) -> Stamped | GapLine:
    """The append of a record in the form of a diff, an export or `topics append`.

    Raises `ValueError`, with a message for people, for anything that is not a record.
    """
    if "tombstone" in members:
        gap = _TOMBSTONE.decode(members["tombstone"])
        return GapLine(gap.gap_from, gap.gap_to, gap.reason)
    for name in members:
        if name not in _PLAIN and not name.startswith("$"):
            raise ValueError(
                f"the member {_shown(name)} is not one of a record; --data-field and --whole-lines "
                "take lines of another form"
            )
    if "data" not in members:
        raise ValueError("a record has a member 'data'")
    seq = _whole(members, "$seq")
    ts = _whole(members, "$ts")
    tag = _part(members, "tag", b'"', "string")
    node = _part(members, "node", b'"', "string")
    meta = _part(members, "meta", b"{", "object")
    encoding = _text(members, "$encoding")
    content_type = _text(members, "$content_type")
    origin = Origin(source, line, seq, ts, encoding, content_type, _text(members, "$trace"))
    cut = Cut(bytes(members["data"]), tag, node, stamped_meta(meta, origin))
    return Stamped(cut.render(), seq, ts)


class LineStamper:
    """Turns lines into appends: lines of records, or lines of a `shape`."""

    def __init__(self, shape: Shape | None, time_field: str | None) -> None:
        """`shape` names the fields of a line that become the record's parts; None: lines are
        records.

        `time_field`: the field with the time, in ms since 1970 or as RFC 3339. Raises `ValueError`
        for names that no line can have.
        """
        self._cutter = None if shape is None else Cutter(shape)
        self._time_field = time_field
        self._text = Cutter(Shape())

    def stamped(
        self, lines: Sequence[bytes], first_line: int, source: str
    ) -> list[Stamped | GapLine | BadLine]:
        """The record of each line, or an error for a line that is no record."""
        found: list[Stamped | GapLine | BadLine] = []
        for number, line in enumerate(lines, first_line):
            try:
                found.append(self._stamped(line, number, source))
            except BadLine as error:
                found.append(error)
            except UnicodeDecodeError as error:
                found.append(BadLine(number, f"not UTF-8: {error.reason}"))
            except msgspec.ValidationError as error:
                found.append(BadLine(number, f"{error}"))
            except (msgspec.DecodeError, RecursionError) as error:
                found.append(BadLine(number, f"not JSON: {error}"))
            except ValueError as error:
                found.append(BadLine(number, f"{error}"))
        return found

    def _stamped(self, line: bytes, number: int, source: str) -> Stamped | GapLine:
        if self._cutter is None:
            line.decode()  # the parser does not check strings that it skips
            members = _members.decode(line)
            if self._time_field is not None and self._time_field in members:
                at = members.pop(self._time_field)
                members["$ts"] = Raw(b"%d" % _time(at, self._time_field))
            return stamped_record(members, source, number)
        (cut,) = self._cutter.cut([line], number)
        ts = None
        if self._time_field is not None:
            members = _members.decode(line)
            if self._time_field in members:
                ts = _time(members[self._time_field], self._time_field)
        origin = Origin(source, number, None, ts)
        whole = msgspec.structs.replace(cut, meta=stamped_meta(cut.meta, origin))
        return Stamped(whole.render(), None, ts)


def _part(members: Mapping[str, Raw], name: str, first: bytes, kind: str) -> bytes | None:
    """A part of a record, under its name for readers or for writers."""
    for key in (f"${name}", name):
        if key in members and (text := bytes(members[key])) != b"null":
            if not text.startswith(first):
                raise ValueError(f"the member {_shown(key)} is not a JSON {kind}")
            return text
    return None


def _text(members: Mapping[str, Raw], name: str) -> str | None:
    text = members.get(name)
    if text is None:
        return None
    return msgspec.json.decode(text, type=str | None)


def _whole(members: Mapping[str, Raw], name: str) -> int | None:
    text = members.get(name)
    if text is None:
        return None
    found = msgspec.json.decode(text, type=int | None)
    if found is not None and not -_TIME_MAX <= found <= _TIME_MAX:
        raise ValueError(f"the member {_shown(name)} is too large")
    return found


def _time(text: Raw, name: str) -> int:
    """A time in ms since 1970."""
    value = msgspec.json.decode(text)
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"the field {_shown(name)} is not a time of RFC 3339") from None
        found = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        return round(found.timestamp() * 1000)
    if isinstance(value, int) and not isinstance(value, bool) and -_TIME_MAX <= value <= _TIME_MAX:
        return value
    raise ValueError(f"the field {_shown(name)} is not a time: ms since 1970, or RFC 3339")


def _shown(name: str) -> str:
    return repr(name if len(name) <= 40 else name[:39] + "…")
