"""The scrub of a real server: it finds damage that no reader has found."""

from __future__ import annotations

from pathlib import Path

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Server, eventually, good

COUNT = 50


def metric(api: Api, name: str) -> float:
    """The value of a metric without labels."""
    lines = api.http.get("/v0/metrics").text.splitlines()
    (found,) = [line for line in lines if line.split(" ")[0] == name]
    return float(found.split(" ")[1])


def sealed(server: Server, topic: str) -> Path:
    """The file of the last of some sealed segments."""
    api = server.start()
    for number in range(0, COUNT, 10):
        api.add(topic, *(f"record {n} " + "x" * 100 for n in range(number, number + 10)))
        good(api.http.post("/v0/admin/seal"))
    return max((server.data_dir / "segments").rglob("*.data"))


def damage(path: Path) -> None:
    """Change a byte in the middle of the file's last payload."""
    content = path.read_bytes()
    at = content.rindex(b"record ") + 20
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))


def test_the_scrub_finds_damage_that_nobody_reads(own: NewServer, topic: str) -> None:
    off = {
        "TOPICS_SEGMENT_MAX_EVENTS": "10",
        "TOPICS_SCRUB_PASS_MS": "1000",
        "TOPICS_SCRUB_MIB_PER_SECOND": "0",
    }
    server = own(**off)
    path = sealed(server, topic)
    server.stop()
    damage(path)
    api = server.start()
    assert metric(api, "topics_scrub_bytes_total") == 0
    assert metric(api, "topics_records_damaged") == 0
    server.stop()

    server.env = {**server.env, "TOPICS_SCRUB_MIB_PER_SECOND": "64"}
    api = server.start()
    eventually(lambda: metric(api, "topics_scrub_damaged_records_total") == 1, "it is found", 60)
    assert metric(api, "topics_records_damaged") == 1
    assert api.get_state(topic)["damaged_records"] == 1
    eventually(lambda: metric(api, "topics_scrub_passes_total") >= 1, "a pass ends", 60)
    assert metric(api, "topics_scrub_bytes_total") > COUNT * 100
    assert metric(api, "topics_scrub_last_pass_timestamp_ms") > 0
    assert metric(api, "topics_scrub_damaged_records_total") == 1
    page = api.diff(topic, from_seq=COUNT - 1).json()
    assert page["tombstone"]["reason"] == "damaged"
    assert (page["tombstone"]["gap_from"], page["tombstone"]["gap_to"]) == (COUNT, COUNT)
    # The server stops in the middle of a scrub.
    server.stop()
