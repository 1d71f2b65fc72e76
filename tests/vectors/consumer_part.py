"""The consumers of a golden data directory, their holds, and the sessions with prefixes.

They have every stored form: in a snapshot, and changed or made in the journal's tail.
"""

from __future__ import annotations

from typing import Any, Final

from tests.contract.driver import Api, good

CLASSES: Final = ("fsync", "disk", "memory", "ephemeral")
# A topic whose caps wait; it has consumers with and without a hold.
HOLDING: Final = "holding"
LATE: Final = "created-late"


def put(api: Api, topic: str, consumer: str, **body: Any) -> None:
    """Make a consumer, or change its hold."""
    good(api.http.put(f"/v0/topics/{topic}/consumers/{consumer}", json=body))


def hold(records: int) -> dict[str, int]:
    """A hold of this many records."""
    return {"max_records": records, "max_bytes": 1 << 20}


def first_consumers(api: Api, records: list[dict[str, Any]]) -> None:
    """Consumers that a snapshot holds; `records` for the topic whose caps wait."""
    for topic in CLASSES:
        for name, seq in (("kept", 50), ("moved", 20), ("going", 10)):
            put(api, topic, name, **{"from": seq})
    good(api.put(HOLDING, {"cap_records": 10}))
    for name in ("slow", "changed", "freed"):
        put(api, HOLDING, name, hold=hold(40))
    put(api, HOLDING, "plain")
    good(api.append(HOLDING, records))


def last_consumers(api: Api, records: list[dict[str, Any]]) -> None:
    """Commits, a deletion, other holds and new consumers in the journal."""
    for topic in CLASSES:
        url = f"/v0/topics/{topic}/consumers"
        good(api.http.post(f"{url}/moved/commit", json={"seq": 120}))
        good(api.http.post(f"{url}/moved/commit", json={"seq": 110, "rewind": True}))
        good(api.http.delete(f"{url}/going"))
        put(api, topic, "late", **{"from": 77})
    put(api, HOLDING, "changed", hold=hold(30))
    put(api, HOLDING, "freed", hold=None)
    put(api, HOLDING, "made", hold=hold(20))
    good(api.http.post(f"/v0/topics/{HOLDING}/consumers/slow/commit", json={"seq": 12}))
    # This comes after all changes, so the topic's floor is final.
    good(api.append(HOLDING, records))


def holds_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The stored part of a list of consumers: their holds by name."""
    return {each["consumer"]: each["hold"] for each in answer["consumers"]}


def growing(api: Api, watched: tuple[str, ...], from_seq: int) -> str:
    """Open a session with a prefix; returns its wid."""
    topics = {name: {"from_seq": from_seq} for name in watched}
    body = {"topics": topics, "prefixes": {"created-": {}, "none.": {"tail": True}}, "limit": 7}
    return str(good(api.http.post("/v0/watch", json=body))["wid"])


def committing(api: Api) -> str:
    """Open a session that commits for its consumer; returns its wid."""
    topics = {"disk": {"consumer": "kept", "ack": "auto"}}
    return str(good(api.http.post("/v0/watch", json={"topics": topics, "limit": 7}))["wid"])
