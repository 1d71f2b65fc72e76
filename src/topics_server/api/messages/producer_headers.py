"""Reads and writes the producer headers of a request. Pure.

`Producer-Id`, `Producer-Epoch` and `Producer-Seq` come together or not at all. A publish over
WebSocket has the same three values as fields. Called by `api/records/handlers`,
`api/websocket/commands`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from topics_server.engine.answers import Appended
from topics_server.values.errors import TopicsError, invalid
from topics_server.values.limits import PRODUCER_ID_CHARS_MAX, PRODUCER_NUMBER_MAX
from topics_server.values.model import ProducerStamp

ID: Final = b"producer-id"
EPOCH: Final = b"producer-epoch"
SEQ: Final = b"producer-seq"
FIELDS: Final = frozenset((ID, EPOCH, SEQ))

_DIGITS_MAX: Final = 32
# A number with fewer digits is within the bound.
_UNBOUNDED_DIGITS: Final = len(str(PRODUCER_NUMBER_MAX))
_SHOWN: Final = {ID: "Producer-Id", EPOCH: "Producer-Epoch", SEQ: "Producer-Seq"}


def stamp_of(headers: Mapping[bytes, bytes]) -> ProducerStamp | None:
    """The producer and the number of this request; None without the headers.

    Raises `invalid_request`.
    """
    producer_id, epoch, seq = headers.get(ID), headers.get(EPOCH), headers.get(SEQ)
    if producer_id is None or epoch is None or seq is None:
        if producer_id is epoch is seq:
            return None
        raise incomplete(_missing(headers), tuple(_SHOWN.values()))
    # A value may end in blanks, so without this bound the cache would hold values of any length.
    name, number = _life_of(producer_id, epoch.strip())
    return ProducerStamp(name, number, _number(seq, SEQ))


# Cached, because a producer repeats these header values.
@lru_cache(maxsize=1024)
def _life_of(producer_id: bytes, epoch: bytes) -> tuple[str, int]:
    try:
        name = producer_id.decode()
    except UnicodeDecodeError:
        raise invalid("Producer-Id must be UTF-8", "Producer-Id") from None
    check_id(name, "Producer-Id")
    return name, _number(epoch, EPOCH)


def _missing(headers: Mapping[bytes, bytes]) -> str:
    return next(shown for name, shown in _SHOWN.items() if name not in headers)


def stamp_of_fields(
    producer_id: str | None, epoch: int | None, seq: int | None
) -> ProducerStamp | None:
    """The producer and the number of a publish, from its fields."""
    fields = {"producer_id": producer_id, "producer_epoch": epoch, "producer_seq": seq}
    if producer_id is None and epoch is None and seq is None:
        return None
    for name, value in fields.items():
        if value is None:
            raise incomplete(name, tuple(fields))
    assert producer_id is not None
    assert epoch is not None
    assert seq is not None
    check_id(producer_id, "producer_id")
    for name, number in (("producer_epoch", epoch), ("producer_seq", seq)):
        if not 0 <= number <= PRODUCER_NUMBER_MAX:
            raise _no_number(name)
    return ProducerStamp(producer_id, epoch, seq)


def incomplete(missing: str, names: tuple[str, ...]) -> TopicsError:
    """The error 400 for a request that has some of the three headers but lacks `missing`."""
    return invalid(f"send {', '.join(names)} together or not at all; {missing} is missing", missing)


def check_id(producer_id: str, field: str) -> None:
    """Raise `invalid_request` for an empty or too long id."""
    if not 0 < len(producer_id) <= PRODUCER_ID_CHARS_MAX:
        raise invalid(f"{field} must have 1 to {PRODUCER_ID_CHARS_MAX} characters", field)


def _number(value: bytes, name: bytes) -> int:
    # `isdigit` of bytes accepts ASCII digits only. A longer number could take long to parse.
    if value.isdigit() and len(value) < _UNBOUNDED_DIGITS:
        return int(value)
    value = value.strip()
    if not value.isdigit() or len(value) > _DIGITS_MAX or int(value) > PRODUCER_NUMBER_MAX:
        raise _no_number(_SHOWN[name])
    return int(value)


def _no_number(field: str) -> TopicsError:
    return invalid(f"{field} must be a whole number from 0 to {PRODUCER_NUMBER_MAX}", field)


def accepted_lines(epoch: int, seq: int) -> bytes:
    """The header lines of an answer that report the highest accepted request."""
    return b"producer-epoch: %d\r\nproducer-seq: %d\r\n" % (epoch, seq)


def receipt_lines(stamp: ProducerStamp, done: Appended) -> bytes:
    """The header lines of an answer to this producer (contract README, Producers on `/v0`)."""
    repeat = done.repeat
    if repeat is None:
        return accepted_lines(stamp.epoch, stamp.seq)
    lines = accepted_lines(repeat.epoch, repeat.seq)
    if repeat.is_last:
        lines += b"topic-first-seq: %d\r\ntopic-last-seq: %d\r\n" % (done.first_seq, done.last_seq)
    return lines
