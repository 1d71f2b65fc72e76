"""Keeps the epochs of dropped names in the snapshot. Pure.

They are kept beside the topics' parts, under an id that no topic has. Called by the checkpointer
and recovery.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics_server.engine.topic.registry import Registry
from topics_server.values.limits import DROPPED_NAMES_MAX

_VERSION: Final = 2


class _EpochsPart(msgspec.Struct, array_like=True, frozen=True):
    """`floor`: at least the last epoch of every dropped name that is not in `epochs`.

    Version 1 has no floor.
    """

    version: int
    epochs: dict[str, int]
    floor: int | None = None


_DECODER: Final = msgspec.msgpack.Decoder(_EpochsPart)


def capture_epochs(registry: Registry) -> bytes:
    """The last epoch of every remembered dropped name, and the epoch floor of the others."""
    part = _EpochsPart(_VERSION, registry.dropped_epochs, registry.epoch_floor)
    return msgspec.msgpack.encode(part)


def restore_epochs(registry: Registry, part: bytes) -> None:
    """Restore the epochs. Raises `ValueError` for invalid bytes."""
    try:
        found = _DECODER.decode(part)
    except msgspec.DecodeError as error:
        raise ValueError(f"not captured epochs: {error}") from None
    if not 1 <= found.version <= _VERSION:
        raise ValueError(f"captured epochs have version {found.version}, not 1 or {_VERSION}")
    if found.floor is not None:
        registry.raise_epoch_floor(found.floor)
    elif found.version != 1:
        raise ValueError("not captured epochs: the floor is missing")
    elif len(found.epochs) >= DROPPED_NAMES_MAX:
        # A full table of version 1 may have forgotten names; assume that their epochs are not
        # higher.
        registry.raise_epoch_floor(max(found.epochs.values()))
    for name, epoch in found.epochs.items():
        registry.remember_epoch(name, epoch)
