"""Stream offsets as text. Pure.

`0000000000000042_0000000000000007` is the position after seq 42 of topic 7: sixteen digits each, so
the texts of one stream sort like its positions. The topic id distinguishes the stream from a
dropped one of the same path.
"""

from __future__ import annotations

import re
from typing import Final

from topics_server.streams.values import Position
from topics_server.values.errors import invalid
from topics_server.values.limits import SEQ_MAX

_FORM: Final = re.compile(r"([0-9]{1,20})_([0-9]{1,20})")


def text_of(position: Position) -> str:
    """The offset of a position."""
    return f"{position.seq:016d}_{position.topic_id:016d}"


def position_of(text: str, field: str) -> Position:
    """The position of an offset. Raises `invalid_request` for anything else."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise invalid(f"{field} is not an offset of this server", field)
    seq, topic_id = int(found[1]), int(found[2])
    if seq > SEQ_MAX or topic_id > SEQ_MAX:
        raise invalid(f"{field} is not an offset of this server", field)
    return Position(seq, topic_id)
