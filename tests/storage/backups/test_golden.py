"""A golden backup: later servers list, verify and restore it byte for byte.

`tests/vectors/backup-v1` is a backup of `tests/vectors/store-v11`. If this fails, stored bytes
changed their meaning: fix the code, never the vector.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import msgspec
import pytest

from tests.vectors.stored import VECTORS
from topics_server.archive.object_store import FolderStore
from topics_server.archive.repository import Repository
from topics_server.archive.restore import restore
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import dump, verify

FS = OsFs()
FIELDS = ("topic", "seq", "ts", "tag", "node", "data", "meta", "deleted")


def digest_of(data_dir: Path) -> tuple[int, str]:
    """How many records a directory holds, and a checksum of all of them."""
    digest, count = hashlib.sha256(), 0
    for item in dump(FS, str(data_dir)):
        count += 1
        for field in FIELDS:
            value = item.get(field)
            digest.update(msgspec.json.encode(value))
            digest.update(b"\0")
    return count, digest.hexdigest()


@pytest.mark.slow
def test_a_golden_backup_is_restored(tmp_path: Path) -> None:
    vector = VECTORS / "backup-v1"
    expected = json.loads((vector / "expected.json").read_bytes())
    with tarfile.open(vector / "backup.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    store = FolderStore.open(FS, str(tmp_path / "backups"), write=False)
    repository = Repository(store)
    assert repository.numbers() == [1]
    facts = repository.facts(1)
    assert (facts.topics, facts.last_lsn) == (expected["topics"], expected["last_lsn"])
    assert repository.verify().problems == []
    restore(FS, store, str(tmp_path / "restored"))
    assert verify(FS, str(tmp_path / "restored")).problems == []
    assert digest_of(tmp_path / "restored") == (expected["records"], expected["sha256"])
