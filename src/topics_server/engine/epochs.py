"""Epochs of dropped names as a part of a snapshot: the next topic of a name is another one.

Kept beside the topics' parts under an id no topic has. Called by the checkpointer and recovery.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics_server.engine.registry import Registry

_VERSION: Final = 1
_DECODER: Final = msgspec.msgpack.Decoder(tuple[int, dict[str, int]])


def capture_epochs(registry: Registry) -> bytes:
    """The last epoch of every name that was dropped and is remembered."""
    return msgspec.msgpack.encode((_VERSION, registry.dropped_epochs))


def restore_epochs(registry: Registry, part: bytes) -> None:
    """Take the epochs over. Raises `ValueError` for bytes that are no such part."""
    try:
        version, epochs = _DECODER.decode(part)
    except msgspec.DecodeError as error:
        raise ValueError(f"not captured epochs: {error}") from None
    if version != _VERSION:
        raise ValueError(f"captured epochs have version {version}, not {_VERSION}")
    for name, epoch in epochs.items():
        registry.remember_epoch(name, epoch)
