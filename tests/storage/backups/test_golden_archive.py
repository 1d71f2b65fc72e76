"""A golden archive: later servers list, verify and restore it byte for byte.

`tests/vectors/archive-v1` has bases, parts with deletes, leases and consumers, a gap, and what a
prune noted. If this fails, stored bytes changed their meaning: fix the code, never the vector.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tests.storage.backups.test_golden import digest_of
from tests.vectors.stored import VECTORS
from topics_server.archive.continuous.bases import ArchiveBases
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.continuous.moments import Moments, RestorePoint
from topics_server.archive.continuous.places.shared_folder import SharedFolder
from topics_server.archive.continuous.restoring import restore_moment
from topics_server.archive.continuous.verifying import verify_archive
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify

FS = OsFs()


@pytest.mark.slow
def test_a_golden_archive_is_restored(tmp_path: Path) -> None:
    vector = VECTORS / "archive-v1"
    expected = json.loads((vector / "expected.json").read_bytes())
    with tarfile.open(vector / "archive.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    store = SharedFolder.open(FS, str(tmp_path / "archive"))
    found = verify_archive(store)
    assert found.problems == []
    shown = {"bases": found.bases, "parts": found.parts, "stretches": found.stretches}
    assert shown == expected["verified"]
    history = ArchiveHistory(store)
    assert history.first() == expected["first_part"] > 1
    assert [each.part for each in ArchiveBases(store, history).kept()] == expected["base_parts"]
    for name, moment in expected["moments"].items():

        def find(moments: Moments, moment: dict[str, int] = moment) -> RestorePoint:
            if "ts_ms" in moment:
                return moments.at_time(moment["ts_ms"])
            return moments.at_seq("t", moment["seq"]) if "seq" in moment else moments.newest()

        target = tmp_path / name
        made = restore_moment(FS, store, str(target), find)
        assert made.lsn == moment["lsn"], name
        assert verify(FS, str(target)).problems == []
        assert digest_of(target) == (moment["records"], moment["sha256"]), name
