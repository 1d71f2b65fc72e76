"""A server without free file descriptors: it refuses requests for the moment, but nothing breaks
for good.

`RLIMIT_NOFILE` of a running server is lowered to what it has open, so that every further open
fails with EMFILE, then raised again.
"""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path

import pytest

from tests.contract.driver import Server, eventually, good, refused

_ENV = {
    "TOPICS_WAL_SHARDS": "2",
    "TOPICS_SEGMENT_MAX_EVENTS": "50",
    "TOPICS_SEGMENT_MAX_AGE_MS": "200",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "1000",
    "TOPICS_WAL_FSYNC_INTERVAL_MS": "20",
}
_STARVED_S = 5.0


def _segments(server: Server) -> set[Path]:
    return set((server.data_dir / "segments").rglob("*.data"))


@pytest.mark.crash
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit(2)")
@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_without_descriptors_appends_go_on_and_no_shard_is_lost(
    tmp_path: Path, durability: str
) -> None:
    """The server reports no failed sync; sealing and checkpoints continue once descriptors are
    free.
    """
    server = Server(tmp_path / "server", _ENV)
    api = server.start()
    assert server.process is not None
    pid = server.process.pid
    stored = {"a": 0, "b": 0}
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)

    def append_some() -> None:
        for topic in stored:
            api.add(topic, stored[topic])
            stored[topic] += 1

    try:
        for topic in stored:
            api.put(topic, {"durability": durability})
        for _ in range(60):
            append_some()
        eventually(lambda: len(_segments(server)) >= 2, "something is sealed")
        # Open descriptors stay open and no further one can be opened: the limit is 3, and 0 to 2
        # are in use.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        sealed, before = _segments(server), stored["a"]
        deadline = time.monotonic() + _STARVED_S
        while time.monotonic() < deadline:
            append_some()
            time.sleep(0.01)
        assert stored["a"] > before + 20
        assert good(api.delete("b", before_seq=11))["deleted"] == 10
        # Payloads in a segment whose file is not open are refused for the moment.
        answer = api.diff("a", from_seq=0, limit=1000)
        if answer.status_code != 200:
            assert refused(answer, 429, "throttled")["limit"] == "disk"
        # The delete may have left a whole segment without live records.
        assert _segments(server) <= sealed, "nothing could be sealed"
        told = api.http.get("/v0/ready").json()
        assert told["status"] == "degraded", told
        assert "read_only_shards" not in told, told
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        eventually(lambda: not _segments(server) <= sealed, "sealing goes on", within_s=30)

        def is_ready() -> bool:
            append_some()
            return bool(api.http.get("/v0/ready").json()["status"] == "ready")

        eventually(is_ready, "nothing is degraded", within_s=30)
        story = server.log.read_text()
        assert "is read-only until a restart" not in story
        assert "Too many open files" in story or "EMFILE" in story
        api = server.crash()
        assert [r["data"] for r in api.read_all("a")] == list(range(stored["a"]))
        assert [r["data"] for r in api.read_all("b")] == list(range(10, stored["b"]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        server.stop()
