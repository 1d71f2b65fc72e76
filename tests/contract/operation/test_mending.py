"""A running server mends damaged segments from its archive; readers see the records again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good

COUNT = 30
SETTINGS = {
    "TOPICS_SEGMENT_MAX_EVENTS": "10",
    "TOPICS_SCRUB_PASS_MS": "1000",
    "TOPICS_SCRUB_MIB_PER_SECOND": "64",
    "TOPICS_ARCHIVE_BASE_INTERVAL_MS": "1000",
}


def figures(api: Api) -> Json:
    shown: Json = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
    return shown


def damage(path: Path) -> bytes:
    """Change a byte of the file's last payload; the damaged content."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b"record ") + 20] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    return bytes(content)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_damaged_segment_is_mended_without_a_restart(
    own: NewServer, topic: str, tmp_path: Path
) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    server = own(TOPICS_ARCHIVE_URL=f"file://{folder}", **SETTINGS)
    api = server.start()
    for number in range(0, COUNT, 10):
        api.add(topic, *(f"record {n} " + "x" * 100 for n in range(number, number + 10)))
        good(api.http.post("/v0/admin/seal"))
    records = api.read_all(topic)

    def has_copies() -> bool:
        return len(list(folder.glob("segments/*/*.data"))) == COUNT // 10

    def is_archived() -> bool:
        api.add("other", 1)
        return has_copies()

    eventually(is_archived, "the archive has copies", within_s=60)
    # A scrub that finds nothing at first looks again after a minute.
    server.stop()
    api = server.start()
    paths = sorted((server.data_dir / "segments").rglob("*.data"))[: COUNT // 10]
    copies = sorted(folder.glob("segments/*/*.data"))
    # The archive is unreachable for a while: the damage is reported and waits for mending.
    hidden = {copy: copy.with_suffix(".hidden") for copy in copies}
    for copy, name in hidden.items():
        copy.rename(name)
    damaged = damage(paths[-1])
    eventually(lambda: figures(api)["topics_mend_failures_total"] >= 1, "a mend fails", within_s=60)
    shown = figures(api)
    assert shown["topics_mended_segments_total"] == 0
    assert shown["topics_mend_waiting_segments"] == 1
    assert api.get_state(topic)["damaged_records"] == 1
    told = api.diff(topic, from_seq=COUNT - 1).json()
    assert told["tombstone"]["reason"] == "damaged"
    ready = good(api.http.get("/v0/ready"))
    assert ready["status"] == "degraded"
    assert ready["reasons"] == ["1 damaged segments are not mended: see the log"]

    for copy, name in hidden.items():
        name.rename(copy)
    eventually(lambda: figures(api)["topics_mended_segments_total"] == 1, "it mends", within_s=60)
    assert api.read_all(topic) == records
    shown = figures(api)
    assert shown["topics_mended_records_total"] == 1
    assert shown["topics_mend_waiting_segments"] == 0
    assert shown["topics_records_damaged"] == 0
    assert api.get_state(topic)["damaged_records"] == 0
    assert good(api.http.get("/v0/ready"))["status"] == "ready"
    (kept,) = (server.data_dir / "quarantine").rglob("*.data.*")
    assert kept.read_bytes() == damaged
    told_back = "was mended from the archive, 1 records are back"
    eventually(lambda: told_back in server.log.read_text(), "the log says so", within_s=60)
    server.stop()
    api = server.start()
    assert api.read_all(topic) == records
    assert figures(api)["topics_records_damaged"] == 0
