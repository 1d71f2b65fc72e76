"""Beyond the contract: `PATCH` of single fields, and fields of a body without effect."""

from __future__ import annotations

import threading

import httpx
import pytest

from tests.contract.driver import CONFIG_DEFAULTS, Api, Json, good, refused


def patched(api: Api, topic: str, patch: object, **headers: str) -> Json:
    answer = api.http.patch(f"/v0/topics/{topic}", json=patch, headers=headers)
    told: Json = good(answer)
    assert api.get_state(topic)["config"] == told["config"]
    return told


def test_a_patch_changes_only_the_named_fields(api: Api, topic: str) -> None:
    api.put(topic, {"type": "queue", "ttl_ms": 5000, "max_deliveries": 3})
    told = patched(api, topic, {"ttl_ms": 60_000, "lease_ms": 2000})
    assert told["created"] is False
    assert told["changed"] == {"ttl_ms": [5000, 60_000], "lease_ms": [30_000, 2000]}
    before = CONFIG_DEFAULTS | {"type": "queue", "max_deliveries": 3}
    assert told["config"] == before | {"ttl_ms": 60_000, "lease_ms": 2000}
    assert patched(api, topic, {})["changed"] == {}


def test_null_gives_a_field_its_default(api: Api, topic: str) -> None:
    api.put(topic, {"ttl_ms": 5000, "priority": 7, "durability": "fsync"})
    told = patched(api, topic, {"ttl_ms": None, "priority": None, "durability": None})
    assert told["config"] == CONFIG_DEFAULTS
    assert told["changed"]["durability"] == ["fsync", "disk"]


@pytest.mark.parametrize(
    ("patch", "durability"),
    [
        ({"durable": True}, "fsync"),
        ({"durable": False}, "disk"),
        ({"durability": "ephemeral"}, "ephemeral"),
        ({"durability": "memory", "durable": True}, "memory"),
        ({"durability": None, "durable": True}, "fsync"),
    ],
)
def test_both_names_of_the_durability_are_one_fact(
    api: Api, topic: str, patch: Json, durability: str
) -> None:
    api.put(topic, {"durability": "memory"})
    told = patched(api, topic, patch)["config"]
    assert (told["durability"], told["durable"]) == (durability, durability == "fsync")


def test_values_are_clamped_and_refused_as_in_a_put(api: Api, topic: str) -> None:
    api.put(topic, {})
    assert patched(api, topic, {"lease_ms": 1})["config"]["lease_ms"] == 100
    for patch, field in (({"ttl_ms": -1}, "ttl_ms"), ({"discard": "new"}, "discard")):
        answer = api.http.patch(f"/v0/topics/{topic}", json=patch)
        assert refused(answer, 400, "invalid_request")["field"] == field
    for body in (b"[]", b"1", b"null", b"", b"{"):
        answer = api.http.patch(
            f"/v0/topics/{topic}", content=body, headers={"content-type": "application/json"}
        )
        refused(answer, 400, "invalid_request")
    assert api.get_state(topic)["config"] == CONFIG_DEFAULTS | {"lease_ms": 100}


def test_the_type_stays(api: Api, topic: str) -> None:
    api.put(topic, {"type": "log"})
    answer = api.http.patch(f"/v0/topics/{topic}", json={"type": "queue"})
    refused(answer, 409, "topic_exists_incompatible")
    assert patched(api, topic, {"type": "log"})["changed"] == {}


def test_a_topic_that_is_not_there_is_not_made(api: Api, topic: str) -> None:
    answer = api.http.patch(f"/v0/topics/{topic}", json={"ttl_ms": 1})
    refused(answer, 404, "topic_not_found")
    assert api.state(topic).status_code == 404


def test_the_media_type_of_merge_patches_is_taken(api: Api, topic: str) -> None:
    api.put(topic, {})
    headers = {"content-type": "application/merge-patch+json; charset=utf-8"}
    path = f"/v0/topics/{topic}"
    assert good(api.http.patch(path, content=b'{"ttl_ms":9}', headers=headers))["changed"] == {
        "ttl_ms": [0, 9]
    }
    assert api.http.put(path, content=b"{}", headers=headers).status_code == 415
    headers["content-type"] = "text/plain"
    assert api.http.patch(path, content=b"{}", headers=headers).status_code == 415


def test_concurrent_patches_of_different_fields_all_hold(api: Api, topic: str) -> None:
    """The merge happens when the change is decided, so no patch undoes another."""
    api.put(topic, {"type": "queue"})
    fields = ("ttl_ms", "cap_records", "cap_bytes", "lease_ms", "max_deliveries")

    def change(field: str) -> None:
        with httpx.Client(base_url=api.url, trust_env=False, timeout=30) as own:
            for value in range(1000, 1010):
                good(own.patch(f"/v0/topics/{topic}", json={field: value}))

    threads = [threading.Thread(target=change, args=(field,)) for field in fields]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    config = api.get_state(topic)["config"]
    assert {field: config[field] for field in fields} == dict.fromkeys(fields, 1009)


# -- errors of a body ------------------------------------------------------------------------------


def test_a_put_lists_its_changes(api: Api, topic: str) -> None:
    assert "changed" not in good(api.put(topic, {"ttl_ms": 5}))
    assert good(api.put(topic, {}))["changed"] == {"ttl_ms": [5, 0]}
    assert good(api.put(topic, {}))["changed"] == {}


def test_misspelt_members_are_named(api: Api, topic: str) -> None:
    told = good(api.put(topic, {"typ": "queue", "ttl_ms": 1, "x" * 100: 2}))
    assert told["ignored"] == ["typ", "x" * 64]
    assert told["config"]["type"] == "log"
    assert patched(api, topic, {"tttl_ms": 7})["ignored"] == ["tttl_ms"]
    assert "ignored" not in good(api.put(topic, {"ttl_ms": 1}))
    assert len(good(api.put(topic, {f"m{n}": n for n in range(100)}))["ignored"]) == 16


def test_misspelt_members_of_other_control_plane_bodies_are_named(api: Api, topic: str) -> None:
    api.put(topic, {})
    spec = {"source": topic, "dest": f"{topic}.copy", "filters": None}
    assert good(api.http.put(f"/v0/routers/{topic}", json=spec))["ignored"] == ["filters"]
    session = api.http.post("/v0/watch", json={"topics": {topic: {}}, "from": 1})
    assert good(session)["ignored"] == ["from"]
