"""Cuts a line of a file into a record without changing value bytes. Pure.

Defines which fields of a line become parts of a record (`Shape`), the text of a record and of a
whole request body, and the fingerprint of a record that `resume` compares. A line must be one JSON
value. Its parts are copied byte for byte, so numbers, key order, escapes and spaces inside a value
stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import xxhash
from msgspec import UNSET, Raw, UnsetType

Value = Raw | UnsetType
_FIELDS: Final = ("data", "tag", "node", "meta")


class BadLine(Exception):
    """A line that cannot become a record. `line` is its number; blank lines are not counted."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


class Shape(msgspec.Struct, frozen=True):
    """The names of the line's fields that become a record's parts; without `data` the whole line is
    the data.
    """

    data: str | None = None
    tag: str | None = None
    node: str | None = None
    meta: str | None = None


class Cut(msgspec.Struct, frozen=True, gc=False):
    """The parts of one record as JSON text; `tag` and `node` are JSON strings."""

    data: bytes
    tag: bytes | None = None
    node: bytes | None = None
    meta: bytes | None = None

    def render(self) -> bytes:
        """Return the record as JSON text of an append's body."""
        text = b'{"data":' + self.data
        if self.tag is not None:
            text += b',"tag":' + self.tag
        if self.node is not None:
            text += b',"node":' + self.node
        if self.meta is not None:
            text += b',"meta":' + self.meta
        return text + b"}"


def fingerprint(data: bytes, tag: str | None, node: str | None, meta: bytes | None) -> bytes:
    """Return a hash of 16 bytes over all parts of a record; only equal records share it (but for
    chance).
    """
    # JSON text has no byte 0, so a byte 0 separates the parts.
    parts = (
        data,
        b"" if tag is None else b"t" + tag.encode(),
        b"" if node is None else b"n" + node.encode(),
        b"" if meta is None else meta,
    )
    return xxhash.xxh3_128_digest(b"\0".join(parts))


class Cutter:
    """Cuts lines of one shape; `node` is the writer's node for lines without one."""

    def __init__(self, shape: Shape, node: str | None = None) -> None:
        self._shape = shape
        self._node = node
        self._whole = msgspec.json.Decoder(Raw)
        self._row = _row_decoder(shape)

    def cut(self, lines: Sequence[bytes], first_line: int) -> list[Cut]:
        """Return the records of these lines; raises `BadLine`."""
        self._check_text(lines, first_line)
        wholes = self._decode(self._whole, lines, first_line)
        if self._row is None:
            return [Cut(bytes(whole)) for whole in wholes]
        rows = self._decode(self._row, lines, first_line)
        takes_line = self._shape.data is None
        return [
            Cut(
                bytes(wholes[n] if takes_line else row.data),
                _text(row, "tag", first_line + n, self._shape.tag),
                _text(row, "node", first_line + n, self._shape.node),
                _object(row, "meta", first_line + n, self._shape.meta),
            )
            for n, row in enumerate(rows)
        ]

    def prints(self, cuts: Sequence[Cut]) -> list[bytes]:
        """Return the fingerprints of these records as the server will store them."""
        return [
            fingerprint(
                cut.data,
                None if cut.tag is None else msgspec.json.decode(cut.tag, type=str),
                self._node if cut.node is None else msgspec.json.decode(cut.node, type=str),
                cut.meta,
            )
            for cut in cuts
        ]

    def body(self, cuts: Sequence[Cut], key: str, *, create: bool) -> bytes:
        """Return the request body that appends these records in one call, under an idempotency
        key.
        """
        assert cuts, "an append has records"
        head: dict[str, Any] = {"idempotency_key": key, "create": create}
        if self._node is not None:
            head["node"] = self._node
        records = b",".join([cut.render() for cut in cuts])
        return msgspec.json.encode(head)[:-1] + b',"records":[' + records + b"]}"

    def _check_text(self, lines: Sequence[bytes], first_line: int) -> None:
        # The parser does not check the inside of strings that it skips.
        try:
            b"\n".join(lines).decode()
        except UnicodeDecodeError:
            for line, text in enumerate(lines, first_line):
                try:
                    text.decode()
                except UnicodeDecodeError as error:
                    raise BadLine(line, f"not UTF-8: {error.reason}") from None
            raise AssertionError("one of the lines is not UTF-8") from None

    def _decode(
        self, decoder: msgspec.json.Decoder[Any], lines: Sequence[bytes], first_line: int
    ) -> list[Any]:
        found: list[Any] = []
        try:
            # Parse each line alone: parsed together, an error in one line could cancel one in the
            # next.
            found.extend(map(decoder.decode, lines))
        except msgspec.ValidationError as error:
            raise BadLine(first_line + len(found), f"{error}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadLine(first_line + len(found), f"not JSON: {error}") from None
        assert len(found) == len(lines)
        return found


def whole_records() -> Shape:
    """The shape of --records: each line is one record of an append."""
    return Shape("data", "tag", "node", "meta")


def _row_decoder(shape: Shape) -> msgspec.json.Decoder[Any] | None:
    names = [(part, getattr(shape, part)) for part in _FIELDS]
    given = [name for _, name in names if name is not None]
    if not given:
        return None
    if len(given) != len(set(given)):
        raise ValueError("a field of a line can become only one part of a record")
    fields: list[Any] = []
    for part, name in names:
        if name is not None and part == "data":
            fields.append((part, Raw, msgspec.field(name=name)))
        elif name is not None:
            fields.append((part, Raw | UnsetType, msgspec.field(default=UNSET, name=name)))
    try:
        return msgspec.json.Decoder(msgspec.defstruct("Row", fields))
    except ValueError:
        raise ValueError(
            "a field name must not contain \\, a quote or a control character"
        ) from None


def _text(row: object, part: str, line: int, name: str | None) -> bytes | None:
    value: Value = getattr(row, part, UNSET)
    if value is UNSET or (text := bytes(value)) == b"null":
        return None
    if not text.startswith(b'"'):
        raise BadLine(line, f"the field {name!r} is not a string")
    return text


def _object(row: object, part: str, line: int, name: str | None) -> bytes | None:
    value: Value = getattr(row, part, UNSET)
    if value is UNSET or (text := bytes(value)) == b"null":
        return None
    if not text.startswith(b"{"):
        raise BadLine(line, f"the field {name!r} is not an object")
    return text
