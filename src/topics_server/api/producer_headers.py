"""The producer headers: a request's stamp, and what its answer tells of it. Pure.

`Producer-Id`, `Producer-Epoch` and `Producer-Seq` come together or not at all (producer headers).
A publish over WebSocket has the same three as fields. Called by `api/records`, `api/ws_commands`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from topics_server.engine.answers import Appended
from topics_server.errors import TopicsError, invalid
from topics_server.limits import PRODUCER_ID_CHARS_MAX, PRODUCER_NUMBER_MAX
from topics_server.model import ProducerStamp

ID: Final = b"producer-id"
EPOCH: Final = b"producer-epoch"
SEQ: Final = b"producer-seq"

_DIGITS_MAX: Final = 32
_SHOWN: Final = {ID: "Producer-Id", EPOCH: "Producer-Epoch", SEQ: "Producer-Seq"}


def stamp_of(headers: Mapping[bytes, bytes]) -> ProducerStamp | None:
    """Whose request this is; None without the headers. Raises `invalid_request`."""
    there = (ID in headers) + (EPOCH in headers) + (SEQ in headers)
    if there < len(_SHOWN):
        if not there:
            return None
        raise incomplete(_missing(headers), tuple(_SHOWN.values()))
    try:
        producer_id = headers[ID].decode()
    except UnicodeDecodeError:
        raise invalid("Producer-Id must be UTF-8", "Producer-Id") from None
    check_id(producer_id, "Producer-Id")
    return ProducerStamp(producer_id, _number(headers, EPOCH), _number(headers, SEQ))


def _missing(headers: Mapping[bytes, bytes]) -> str:
    return next(shown for name, shown in _SHOWN.items() if name not in headers)


def stamp_of_fields(
    producer_id: str | None, epoch: int | None, seq: int | None
) -> ProducerStamp | None:
    """The same of the fields of a publish."""
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
    """400: some of the three are there, `missing` is not."""
    return invalid(f"{', '.join(names)} come together or not at all: no {missing}", missing)


def check_id(producer_id: str, field: str) -> None:
    """Raises `invalid_request` for an empty or too long id."""
    if not 0 < len(producer_id) <= PRODUCER_ID_CHARS_MAX:
        raise invalid(f"{field} has 1 to {PRODUCER_ID_CHARS_MAX} characters", field)


def _number(headers: Mapping[bytes, bytes], name: bytes) -> int:
    value = headers[name].strip()
    # Of bytes these are ASCII digits only; more of them could take long to read.
    if not value.isdigit() or len(value) > _DIGITS_MAX:
        raise _no_number(_SHOWN[name])
    number = int(value)
    if number > PRODUCER_NUMBER_MAX:
        raise _no_number(_SHOWN[name])
    return number


def _no_number(field: str) -> TopicsError:
    return invalid(f"{field} is a whole number of 0 to {PRODUCER_NUMBER_MAX}", field)


def told_of(stamp: ProducerStamp, done: Appended) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of an answer to this producer (contract README, Producers on `/v0`)."""
    repeat = done.repeat
    if repeat is None:
        return ((EPOCH, b"%d" % stamp.epoch), (SEQ, b"%d" % stamp.seq))
    told = ((EPOCH, b"%d" % repeat.epoch), (SEQ, b"%d" % repeat.seq))
    if not repeat.is_last:
        return told
    return (
        *told,
        (b"topic-first-seq", b"%d" % done.first_seq),
        (b"topic-last-seq", b"%d" % done.last_seq),
    )
