"""Reads a point in time of a request: milliseconds, RFC 3339, or a duration before now. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from topics_server.engine.answers import Moment
from topics_server.values.errors import clipped, invalid
from topics_server.values.limits import TIME_CHARS_MAX, U64_MAX
from topics_server.values.texts.amounts import parse_duration

_PLAIN: Final = re.compile(r"[0-9]{1,20}")
_RFC_3339: Final = re.compile(
    r"(\d{4}-\d{2}-\d{2})[Tt ](\d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?([Zz]|[+-]\d{2}:\d{2})"
)
# A later time in milliseconds is lowered to this one, the largest int64.
_MS_MAX: Final = U64_MAX >> 1


def point_in_time(sent: str, field: str) -> Moment:
    """The point in time that a text means, in ms. Raises `invalid_request` that names the field.

    `1793916000000`, `2026-11-05T10:00:00Z`, or `10m`: ten minutes before the read.
    """
    if len(sent) > TIME_CHARS_MAX:
        raise _refused(sent, field)
    if _PLAIN.fullmatch(sent):
        return Moment(min(int(sent), _MS_MAX))
    found = _RFC_3339.fullmatch(sent)
    if found is not None:
        day, clock, fraction, zone = found.groups()
        zone = "+00:00" if zone in "Zz" else zone
        try:
            at = datetime.fromisoformat(f"{day}T{clock}{zone}")
            whole_s = (at - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
        except (ValueError, OverflowError):
            raise _refused(sent, field) from None
        # Records of exactly this millisecond are included, so a finer time is rounded up.
        ms = -(-int((fraction or "0").ljust(9, "0")) // 1_000_000)
        return Moment(max(0, int(whole_s) * 1000 + ms))
    try:
        return Moment(parse_duration(sent), is_back=True)
    except ValueError:
        raise _refused(sent, field) from None


def _refused(sent: str, field: str) -> Exception:
    return invalid(
        f'{field} must be milliseconds since 1970, an RFC 3339 time such as "2026-11-05T10:00:00Z",'
        f' or a duration before now such as "10m"; "{clipped(sent)}" is none of these',
        field,
    )
