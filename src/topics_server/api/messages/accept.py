"""Reads the header `Accept`: the weight that a client gives to each media type. Pure."""

from __future__ import annotations

import re
from typing import Final

# A weight has three decimals at most.
_WEIGHT: Final = re.compile(rb"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")


def accept_weights(accept: bytes) -> dict[bytes, float]:
    """The weights by media type, in lower case; 0.0: the client refuses the type.

    A malformed weight counts as 1.0, like a missing one.
    """
    weights: dict[bytes, float] = {}
    for offer in accept.split(b","):
        kind, *parameters = offer.split(b";")
        weights[kind.strip().lower()] = _weight(parameters)
    return weights


def _weight(parameters: list[bytes]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip().lower() == b"q":
            value = value.strip()
            return float(value) if _WEIGHT.fullmatch(value) else 1.0
    return 1.0
