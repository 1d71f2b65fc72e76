"""The bytes of a backup: versions and bounds."""

from __future__ import annotations

import pytest

from topics_server.archive import format as backup_format
from topics_server.archive.format import (
    Owner,
    SealedTopic,
    decode_journal,
    decode_owner,
    decode_sealed,
    encode_json,
    encode_sealed,
)
from topics_server.values.errors import Corrupt, StartRefused, StorageError

TOPICS = [SealedTopic(5, b"manifest", []), SealedTopic(6, b"other", [])]


def test_a_newer_format_says_so() -> None:
    """The message does not call the file damaged, because a newer version can read it."""
    with pytest.raises(StartRefused, match=r"STORE: has format 2.* use a newer one"):
        decode_owner(encode_json(Owner(2, "1" * 32, "2" * 32)), "STORE")
    piece = bytearray(encode_sealed(TOPICS))
    piece[8] = 2
    with pytest.raises(StartRefused, match=r"sealed-1: has format 2.* use a newer one"):
        decode_sealed(bytes(piece), "sealed-1")
    with pytest.raises(StartRefused, match=r"journal-1: has format 2.* use a newer one"):
        decode_journal(b"topicsBJ" + bytes([2, 0]) + bytes(30), "journal-1")


def test_a_piece_that_no_restore_takes_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode_sealed(encode_sealed(TOPICS), "sealed-1") == TOPICS
    whole = encode_sealed(TOPICS)
    monkeypatch.setattr(backup_format, "_SEALED_BYTES_MAX", 10)
    with pytest.raises(Corrupt):
        decode_sealed(whole, "sealed-1")
    with pytest.raises(StorageError, match=r"of topics 5 to 6 have .* and a backup takes 10"):
        encode_sealed(TOPICS)
