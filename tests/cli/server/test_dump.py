"""`topics dump` with a damaged journal: it prints everything readable and exits with code 1."""

from __future__ import annotations

import time
from pathlib import Path

from tests.cli.conftest import WEBHOOKS, WITHIN_S, MakeServer, Topics


def test_dump_prints_what_can_be_read_and_says_what_cannot(own: MakeServer, tmp_path: Path) -> None:
    server = own({"TOPICS_SEGMENT_MAX_EVENTS": "100"})
    topics = Topics(server.start().url, tmp_path)
    topics.good("load", "hooks", WEBHOOKS, "--data-field", "payload")
    wait_for_a_segment(server.data_dir)
    server.stop()
    whole = topics.good("dump", server.data_dir).lines
    wheres = {line["where"].split()[0] for line in whole}
    assert wheres == {"hot", "snapshot"}
    damaged = damage_a_group(server.data_dir / "wal")
    ran = topics("dump", server.data_dir)
    assert ran.code == 1
    assert ran.lines == whole
    assert f"{damaged}: " in ran.message
    # The end mark beside the file shows the damage, whether or not a group after it does.
    assert "its groups end at 64, and the end mark says it was synced up to " in ran.message
    assert topics("verify", server.data_dir).code == 1


def wait_for_a_segment(folder: Path) -> None:
    """Sealing follows the next sync."""
    deadline = time.monotonic() + WITHIN_S
    while not list(folder.glob("segments/*/manifest")):
        assert time.monotonic() < deadline, "nothing was sealed"
        time.sleep(0.05)


def damage_a_group(folder: Path) -> Path:
    """Flip a bit in the first group of the shard file with the records."""
    for path in sorted(folder.glob("*.wal")):
        content = bytearray(path.read_bytes())
        at = content.find(b'"payload"')
        if at > 0:
            content[at] ^= 1
            path.write_bytes(content)
            return path
    raise AssertionError("no journal file has records")
