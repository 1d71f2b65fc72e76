"""`POST /v0/admin/seal`: its files afterwards, and its refusals (docs/EXTENSIONS.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, good, refused
from topics_server.wal.format.manifest import Manifest, decode_manifest


def seal(api: Api, *topics: str) -> Json:
    """Seal these topics, or all."""
    body = {"topics": list(topics)} if topics else {}
    return good(api.http.post("/v0/admin/seal", json=body))


def manifests(data_dir: Path) -> dict[str, Manifest]:
    """Manifests by the topic's name."""
    found = (decode_manifest(p.read_bytes()) for p in data_dir.glob("segments/*/manifest"))
    return {manifest.name: manifest for manifest in found}


def test_all_records_are_in_segments_afterwards(own: NewServer) -> None:
    server = own()
    api = server.start()
    api.add("a", *range(7))
    api.add("b", 1)
    good(api.put("e", {"durability": "ephemeral"}))
    api.add("e", 1, 2)
    good(api.put("empty", {}))
    done = seal(api)
    assert (done["topics"], done["segments"], done["unsealed_records"]) == (4, 2, 2)
    listed = {
        name: [(s.first_seq, s.last_seq) for s in m.segments]
        for name, m in manifests(server.data_dir).items()
    }
    assert listed == {"a": [(1, 7)], "b": [(1, 1)]}
    assert [record["data"] for record in api.read_all("a")] == list(range(7))
    assert seal(api)["segments"] == 0, "there is nothing new"
    api.add("a", 8)
    assert seal(api, "b", "b")["topics"] == 1
    assert seal(api, "a")["segments"] == 1


def test_the_manifest_has_the_floor_and_files_have_the_deletes(own: NewServer) -> None:
    server = own()
    api = server.start()
    good(api.put("a", {"cap_records": 5}))
    for n in range(4):
        api.add("a", n, n, tag=f"t{n}")
    seal(api)
    api.add("a", 9)
    good(api.delete("a", match="t2"))
    seal(api)
    live = [record["$seq"] for record in api.read_all("a")]
    assert live == [7, 8, 9]
    manifest = manifests(server.data_dir)["a"]
    flags = b"".join(
        (
            server.data_dir / "segments" / str(manifest.topic_id) / f"{s.segment_id:010d}.data"
        ).read_bytes()[-s.record_count :]
        for s in manifest.segments
    )
    first = manifest.segments[0].first_seq
    shown = [first + row for row, flag in enumerate(flags) if flag == 0]
    assert [seq for seq in shown if seq >= manifest.evict_floor] == live
    api = server.crash()
    assert [record["$seq"] for record in api.read_all("a")] == live


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"topics": "a"}, 400, "invalid_request"),
        ({"topics": ["a b"]}, 400, "invalid_request"),
        ({"topics": [1]}, 400, "invalid_request"),
        ({"topics": ["t"] * 1001}, 400, "invalid_request"),
        ({"topics": ["nobody-made-it"]}, 404, "topic_not_found"),
    ],
)
def test_what_it_refuses(api: Api, body: Json, status: int, code: str) -> None:
    refused(api.http.post("/v0/admin/seal", json=body), status, code)
