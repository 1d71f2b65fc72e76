"""Stream offsets as text. Pure.

`0000000000000042_0000000000000007` is after seq 42 of topic 7: sixteen digits each, so that texts
of one stream sort as its positions do, and a position of another stream of the same path, dropped
since, is recognised.
"""

from __future__ import annotations

import re
from typing import Final

from topics_server.streams.values import Position
from topics_server.values.errors import invalid
from topics_server.values.limits import SEQ_MAX

_FORM: Final = re.compile(r"([0-9]{1,20})_([0-9]{1,20})")


def text_of(position: Position) -> str:
    """The offset that stands for a position."""
    return f"{position.seq:016d}_{position.topic_id:016d}"


def position_of(text: str, field: str) -> Position:
    """The position an offset stands for. Raises `invalid_request` for anything else."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise invalid(f"{field} is not an offset that this server gives", field)
    seq, topic_id = int(found[1]), int(found[2])
    if seq > SEQ_MAX or topic_id > SEQ_MAX:
        raise invalid(f"{field} is not an offset that this server gives", field)
    return Position(seq, topic_id)
