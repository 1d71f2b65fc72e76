"""§6, settled rules: what routers keep over a clean stop and over `kill -9`.

No record is lost, overtakes another, or returns after its delete, and a seq of a destination never
changes its meaning. Each test has a server of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, Server, eventually, good, refused
from tests.contract.queues.queues import Queue
from tests.contract.routers.routing import DEFINITION, Routing, datas_of

HOWS = ["clean stop", "kill -9"]
CRASHES = 3
# # These settings make the server take checkpoints and seal all the time, and put destinations on
# other shards than their sources.
BUSY = {
    "TOPICS_WAL_SHARDS": "4",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "20",
    "TOPICS_SEGMENT_MAX_EVENTS": "64",
}


def _again(server: Server, routing: Routing, how: str) -> Api:
    routing.api = server.restart() if how == "clean stop" else server.crash()
    return routing.api


def _records(api: Api, topics: Sequence[str]) -> dict[str, list[Json]]:
    return {topic: api.read_all(topic, include_tags=True) for topic in topics}


@pytest.mark.parametrize("how", HOWS)
def test_definitions_and_figures_are_kept(own: NewServer, how: str) -> None:
    """Contract §6 [6-06, 6-27, S-30]"""
    server = own()
    routing = Routing(server.start())
    routing.api.add("a", 1, 2)
    routing.made("a", "b", **{"from": "earliest"}, filter=["tag", "Glob", "*"])
    routing.made("a", "c", "named", preserve_node=False, preserve_tag=False)
    routing.made("c", "a", "back", allow_cycle=True)
    routing.made("a", "d", guarantee="exactly_once")
    routing.changed("a->b", "a", "b", filter=["tag", "Eq", "t"])
    routing.made("p", "q")
    gone = routing.made("a", "e")
    routing.drop(gone)
    routing.api.add("a", 3, tag="t")
    # A record circulates between a and c until the hop cap stops it.
    for _ in range(9):
        routing.settled("named", "back", "a->b", "a->d")
    before = {row["router"]: routing.get(row["router"]) for row in routing.rows()}
    assert sorted(before) == ["a->b", "a->d", "back", "named", "p->q"]
    for _ in range(2):
        _again(server, routing, how)
        assert routing.names() == sorted(before)
        for name, state in before.items():
            now = routing.get(name)
            told = (*DEFINITION, "cursor_seq", "lag", "state")
            assert {key: now[key] for key in told} == {key: state[key] for key in told}
            assert now["forwarded_total"] == state["forwarded_total"]
        refused(routing.read(gone), 404, "router_not_found")
        # Allowed routers may continue; refused ones are still refused.
        answer = routing.put("x->b", "x", "b")
        refused(answer, 409, "topic_exists_incompatible")
        refused(routing.put("q->p", "q", "p"), 409, "router_cycle")
    assert routing.changed("named", "a", "c")["created"] is False


@pytest.mark.parametrize(
    ("how", "guarantee", "env"),
    [
        ("clean stop", "at_least_once", {}),
        ("kill -9", "at_least_once", {}),
        ("kill -9", "exactly_once", {}),
        ("kill -9", "at_least_once", BUSY),
        ("kill -9", "exactly_once", BUSY),
    ],
)
def test_forwarding_goes_on_where_it_was(
    own: NewServer, how: str, guarantee: str, env: dict[str, str]
) -> None:
    """Contract §6 [6-06, 6-07, 6-01]: a fan, a chain and a queue; the durable cursor moves with the
    copies, so that after the death of the process alone even at-least-once doubles nothing.
    """
    server = own(**env)
    routing = Routing(server.start())
    api = routing.api
    good(api.put("jobs", {"type": "queue"}))
    fan = [f"fan{number}" for number in range(5)]
    chain = ["a", "chain1", "chain2", "chain3"]
    routers = [routing.made("a", dest, guarantee=guarantee) for dest in (*fan, "jobs")]
    routers += [routing.made(*pair, guarantee=guarantee) for pair in itertools.pairwise(chain)]
    dests = (*fan, "jobs", *chain[1:])
    wanted: list[int] = []
    for _ in range(CRASHES):
        for _ in range(20):
            more = range(len(wanted), len(wanted) + 25)
            api.add("a", *more, tag="t", node="n")
            wanted += more
        seen = _records(api, dests)
        api = _again(server, routing, how)
        routing.settled(*routers)
        now = _records(api, dests)
        for dest in dests:
            assert now[dest][: len(seen[dest])] == seen[dest], "a seq changed its meaning"
            assert datas_of(now[dest]) == wanted
            assert api.read(dest)["tombstone"] is None
    totals = [routing.get(router)["forwarded_total"] for router in routers]
    assert totals == [len(wanted)] * len(routers)


@pytest.mark.parametrize("how", HOWS)
def test_a_backlog_is_forwarded_after_a_restart(own: NewServer, how: str) -> None:
    """Contract §6 [6-06, 6-24]: a stalled router is still stalled, and continues when there is
    room.
    """
    server = own()
    routing = Routing(server.start())
    good(routing.api.put("full", {"cap_records": 2, "discard": "reject"}))
    name = routing.made("a", "full")
    for number in range(300):
        routing.api.add("a", number)
    before = routing.stalled(name)
    assert before["cursor_seq"] <= 2
    api = _again(server, routing, how)
    now = routing.stalled(name)
    assert (now["cursor_seq"], now["lag"]) == (before["cursor_seq"], before["lag"])
    api = _again(server, routing, how)
    good(api.put("full"))
    routing.settled(name)
    assert routing.datas("full") == list(range(300))


@pytest.mark.parametrize("how", HOWS)
def test_deleted_and_evicted_copies_stay_gone(own: NewServer, how: str) -> None:
    """Contract §6, settled rules [S-26, 6-10]: deleted and evicted copies are not forwarded again,
    whether or not the destination still shows that they existed.
    """
    server = own()
    routing = Routing(server.start())
    api = routing.api
    good(api.put("capped", {"cap_records": 10}))
    dests = ("deleted", "capped", "once")
    routers = [routing.made("a", dest) for dest in dests[:2]]
    routers.append(routing.made("a", "once", guarantee="exactly_once"))
    for number in range(100):
        api.add("a", number, tag=f"t{number % 2}")
    routing.settled(*routers)
    for dest in ("deleted", "once"):
        assert good(api.delete(dest, match="t0"))["deleted"] == 50
        good(api.delete(dest, before_seq=21))
    left = {dest: routing.datas(dest) for dest in dests}
    assert left["deleted"] == left["once"] == list(range(21, 100, 2))
    for _ in range(2):
        api = _again(server, routing, how)
        routing.settled(*routers)
        assert {dest: routing.datas(dest) for dest in dests} == left
        assert [api.get_state(dest)["head_seq"] for dest in dests] == [100] * 3
    api.add("a", 100, tag="t1")
    routing.settled(*routers)
    assert {dest: routing.datas(dest)[-1] for dest in dests} == dict.fromkeys(dests, 100)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("fate", ["deleted", "capped", "dropped", "router dropped", "filtered"])
def test_a_copy_survives_whatever_happened_to_where_it_came_from(
    own: NewServer, how: str, fate: str
) -> None:
    """Contract §6 [6-01, 6-05, 6-06]: a copy survives even if its payload was not written a second
    time.
    """
    server = own()
    routing = Routing(server.start())
    api = routing.api
    routers = [routing.made("a", "b"), routing.made("b", "c")]
    for number in range(50):
        api.add("a", number, "x" * 500, tag=f"t{number % 3}", node="n", meta={"k": number})
    routing.settled(*routers)
    before = _records(api, "bc")
    assert len(before["c"]) == 100
    if fate == "deleted":
        good(api.delete("a", match=["tag", "Glob", "*"]))
        good(api.delete("b", match="t1"))
        before["b"] = [record for record in before["b"] if record["$tag"] != "t1"]
    elif fate == "capped":
        good(api.put("a", {"cap_records": 1}))
        api.add("a", "last")
        routing.settled(*routers)
        before = _records(api, "bc")
    elif fate == "dropped":
        good(api.drop("a"))
    elif fate == "router dropped":
        routing.drop("a->b")
        good(api.delete("a", before_seq=101))
    else:
        routing.changed("a->b", "a", "b", filter=["tag", "Eq", "none"], preserve_node=False)
    for _ in range(2):
        api = _again(server, routing, how)
        assert _records(api, "bc") == before
        heads = (api.get_state("b")["head_seq"], api.get_state("c")["head_seq"])
        assert heads == ((101, 101) if fate == "capped" else (100, 100))
    if fate == "dropped":
        assert routing.names() == ["b->c"]


@pytest.mark.parametrize("how", HOWS)
def test_jobs_that_were_forwarded_and_acked_stay_gone(own: NewServer, how: str) -> None:
    """Contract §6, §10.4 [S-26, 6-06]"""
    server = own()
    routing = Routing(server.start())
    queue = Queue.made(routing.api, "jobs", lease_ms=600_000)
    name = routing.made("events", "jobs", filter=["tag", "Glob", "job:*"])
    for number in range(40):
        routing.api.add("events", number, tag="job:a" if number % 2 else "other")
    routing.settled(name)
    jobs = queue.take("w", 10)
    assert queue.ack("w", [job["$seq"] for job in jobs])["acked"] == 10
    queue.api = _again(server, routing, how)
    routing.settled(name)
    rest: list[Json] = []

    def has_all() -> bool:
        rest.extend(queue.take("x", 50))
        return len(rest) >= 10

    eventually(has_all, "the others")
    assert datas_of(rest) == list(range(21, 40, 2))
    assert queue.state()["head_seq"] == 20


@pytest.mark.parametrize(
    ("durability", "how", "kept"),
    [
        ("fsync", "kill -9", True),
        ("disk", "kill -9", True),
        ("disk", "clean stop", True),
        ("ephemeral", "clean stop", False),
        ("ephemeral", "kill -9", False),
    ],
)
def test_copies_honour_the_class_of_their_destination(
    own: NewServer, durability: str, how: str, kept: bool
) -> None:
    """Contract §0.10 [0.10-23]: copies in an ephemeral topic are gone, and readers get a tombstone,
    as for its records.
    """
    server = own()
    routing = Routing(server.start())
    good(routing.api.put("b", {"durability": durability}))
    name = routing.made("a", "b")
    routing.api.add("a", *range(20))
    routing.settled(name)
    before = routing.api.read_all("b")
    assert datas_of(before) == list(range(20))
    api = _again(server, routing, how)
    routing.settled(name)
    page = api.read("b")
    if kept:
        assert (page["records"], page["tombstone"]) == (before, None)
        return
    assert page["tombstone"]["reason"] == "restart"
    # Records that come again are new records: no seq names two of them.
    assert all(record["$seq"] > 20 for record in api.read_all("b", from_seq=20))
    api.add("a", 20)
    routing.settled(name)
    assert routing.api.read_all("b", from_seq=20)[-1]["data"] == 20


@pytest.mark.parametrize("how", HOWS)
def test_exactly_once_holds_up_to_an_ephemeral_topic(own: NewServer, how: str) -> None:
    """Contract §6, settled rules [S-32, 6-09]: after an ephemeral topic copies may come again, but
    none is lost; in other topics no copy is doubled.
    """
    server = own()
    routing = Routing(server.start())
    good(routing.api.put("hot", {"durability": "ephemeral"}))
    once: Any = {"guarantee": "exactly_once"}
    direct = [routing.made("a", "b", **once), routing.made("b", "c", **once)]
    through = [routing.made("a", "hot", **once), routing.made("hot", "behind", **once)]
    wanted: list[int] = []
    for _ in range(CRASHES):
        more = range(len(wanted), len(wanted) + 50)
        routing.api.add("a", *more)
        wanted += more
        routing.settled(*direct, *through)
        _again(server, routing, how)
    routing.settled(*direct, *through)
    assert routing.datas("b") == routing.datas("c") == wanted
    behind = routing.datas("behind")
    assert list(dict.fromkeys(behind)) == wanted


@pytest.mark.parametrize("how", HOWS)
def test_keys_of_exactly_once_are_the_same_after_a_restart(own: NewServer, how: str) -> None:
    """Contract §6 [6-09]: also for a client that makes the router again."""
    server = own()
    routing = Routing(server.start())
    once: Any = {"guarantee": "exactly_once", "from": "earliest"}
    name = routing.made("a", "b", **once)
    routing.api.add("a", *range(30))
    routing.settled(name)
    before = routing.api.read_all("b")
    routing.drop(name)
    routing.api.add("a", 30)
    _again(server, routing, how)
    routing.made("a", "b", **once)
    routing.settled(name)
    after = routing.api.read_all("b")
    assert after[:30] == before
    assert datas_of(after) == list(range(31))
    stamps = [str(record["meta"]["_topics_router"]) for record in after]
    assert len(set(stamps)) == 31


@pytest.mark.parametrize("how", HOWS)
def test_a_cascade_is_durable(own: NewServer, how: str) -> None:
    """Contract §1.4 [1.4-07, 6-33]: no router forwards recreated topics of the old names."""
    server = own()
    routing = Routing(server.start())
    routing.made("a", "b")
    routing.made("b", "c")
    kept = routing.made("c", "d")
    routing.api.add("a", 1)
    routing.settled("a->b", "b->c", kept)
    good(routing.api.drop("b"))
    api = _again(server, routing, how)
    assert routing.names() == [kept]
    good(api.put("b"))
    api.add("a", 2)
    api.add("b", "new")
    api.add("c", 3)
    routing.settled(kept)
    api = _again(server, routing, how)
    assert routing.datas("b") == ["new"]
    assert routing.datas("c") == routing.datas("d") == [1, 3]


def test_sealed_copies_stand_without_their_source(own: NewServer) -> None:
    """Contract §6 [6-05, 6-06]: segments of a destination hold their copies."""
    server = own(
        TOPICS_SEGMENT_MAX_EVENTS="64",
        TOPICS_CHECKPOINT_INTERVAL_MS="50",
        TOPICS_SEGMENT_MAX_AGE_MS="100",
    )
    routing = Routing(server.start())
    routers = [routing.made("a", "b"), routing.made("b", "c")]
    for number in range(300):
        routing.api.add("a", number, meta={"n": number})
    routing.settled(*routers)
    before = _records(routing.api, "bc")
    eventually(
        lambda: bool(routing.api.get_state("c")["disk_bytes"] > 0), "something is sealed", 20
    )
    good(routing.api.drop("a"))
    for how in ("kill -9", "clean stop"):
        api = _again(server, routing, how)
        assert _records(api, "bc") == before
        good(api.delete("b", before_seq=301))
        before["b"] = []
