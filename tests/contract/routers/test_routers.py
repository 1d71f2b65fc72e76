"""§6: routers copy records that are appended to their source, in order, by their definition.

Each test makes topics of its own; most share one server. `test_router_restart.py` tests restarts,
`test_router_bad_input.py` malformed requests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused
from tests.contract.queues.queues import Queue
from tests.contract.routers.routing import DEFAULTS, DEFINITION, Routing, copied, datas_of
from tests.contract.watch.subscriptions import Clients

Names = Callable[[str], str]
HOPS_MAX = 8


@pytest.fixture
def routing(api: Api) -> Routing:
    """The routers of the shared server."""
    return Routing(api)


@pytest.fixture
def ends(names: Names) -> tuple[str, str]:
    """A source and a destination, neither of which exists yet."""
    return names("source"), names("dest")


# --- what a copy is -------------------------------------------------------------------------------


def test_every_record_is_copied_in_order(routing: Routing, ends: tuple[str, str]) -> None:
    """Contract §6 [6-01, 6-07]: records are copied whether they are appended one by one or many at
    once.
    """
    source, dest = ends
    router = routing.made(source, dest)
    for first in range(0, 3000, 500):
        routing.api.add(source, *range(first, first + 400))
        for number in range(first + 400, first + 500):
            routing.api.add(source, number)
    routing.settled(router)
    assert routing.datas(dest) == list(range(3000))
    assert routing.get(router)["forwarded_total"] == 3000


def test_a_copy_is_verbatim_with_a_seq_and_a_time_of_its_own(
    routing: Routing, ends: tuple[str, str]
) -> None:
    """Contract §6 [6-22, 6-01]"""
    source, dest = ends
    api = routing.api
    api.add(source, *range(5))
    api.add(dest, "direct")
    router = routing.made(source, dest)
    body = (
        b'{"records":[{"data":{ "url" : "s3://b","n":1e400,"n":1, "\\u0061":"\\u00e9" },'
        b'"tag":"t:1","node":"n1","meta":{"a": 1,"b":[ ]}},{"data":null},{"data":-0.0,"tag":""}]}'
    )
    answer = api.http.post(
        f"/v0/topics/{source}", content=body, headers={"content-type": "application/json"}
    )
    assert answer.json()["seqs"] == [6, 7, 8]
    routing.settled(router)
    asked = {"include_tags": True}
    first = api.diff(source, from_seq=5, **asked)
    second = api.diff(dest, from_seq=1, **asked)
    ours, theirs = good(first)["records"], good(second)["records"]
    assert [record["$seq"] for record in theirs] == [2, 3, 4]
    assert copied(theirs) == copied(ours)
    assert theirs[0]["$tag"] == "t:1"
    assert "$tag" not in theirs[1]
    assert b'"data":{ "url" : "s3://b","n":1e400,"n":1, "\\u0061":"\\u00e9" }' in second.content
    assert b'"meta":{"a": 1,"b":[ ]}' in second.content
    for ours_, theirs_ in zip(ours, theirs, strict=True):
        assert theirs_["$ts"] >= ours_["$ts"]
    assert [r["$ts"] for r in theirs] == sorted(r["$ts"] for r in theirs)


def test_node_and_tag_are_kept_by_default(routing: Routing, names: Names) -> None:
    """Contract §6 [6-14, 6-15]"""
    source = names("source")
    api = routing.api
    settings = [(node, tag) for node in (None, True, False) for tag in (None, True, False)]
    made = {}
    for node, tag in settings:
        dest = names("dest")
        flags = {"preserve_node": node, "preserve_tag": tag}
        given: Any = {name: value for name, value in flags.items() if value is not None}
        made[(node, tag)] = (routing.made(source, dest, **given), dest)
    api.add(source, 1, node="n", tag="t")
    api.add(source, 2)
    for (node, tag), (router, dest) in made.items():
        routing.settled(router)
        first, second = api.read_all(dest, include_tags=True)
        assert ("$node" in first) is (node is not False)
        assert ("$tag" in first) is (tag is not False)
        assert not {"$node", "$tag"} & set(second)
        state = routing.get(router)
        assert state["preserve_node"] is (node is not False)
        assert state["preserve_tag"] is (tag is not False)


def test_a_tag_delete_reaches_copies_by_their_tag(routing: Routing, ends: tuple[str, str]) -> None:
    """Contract §6, §5 [6-15, 6-22]"""
    source, dest = ends
    router = routing.made(source, dest)
    routing.api.add(source, 1, tag="a")
    routing.api.add(source, 2, tag="b")
    routing.settled(router)
    assert good(routing.api.delete(dest, match="a"))["deleted"] == 1
    assert routing.datas(dest) == [2]
    assert routing.datas(source) == [1, 2]


@pytest.mark.parametrize(
    ("match", "kept"),
    [
        (None, [0, 1, 2, 3, 4, 5]),
        (["tag", "Eq", "a"], [0]),
        (["tag", "Eq", "a:*"], [4]),
        (["tag", "Glob", "a:*"], [1, 2, 4]),
        (["tag", "Glob", "*"], [0, 1, 2, 3, 4]),
        (["tag", "Glob", "nobody*"], []),
    ],
)
def test_a_filter_takes_the_tuples_of_deletes(
    routing: Routing, ends: tuple[str, str], match: Any, kept: list[int]
) -> None:
    """Contract §6 [6-17]"""
    source, dest = ends
    router = routing.made(source, dest, filter=match)
    for number, tag in enumerate(["a", "a:1", "a:2", "A:1", "a:*", None]):
        routing.api.add(source, number, tag=tag)
    routing.settled(router)
    assert routing.datas(dest) == kept
    state = routing.get(router)
    assert state["filter"] == match
    assert state["forwarded_total"] == len(kept)
    assert (state["cursor_seq"], state["lag"]) == (6, 0)


def test_copies_are_read_like_other_records(
    routing: Routing, ends: tuple[str, str], clients: Clients
) -> None:
    """Contract §6, §7, §10 [6-01, 6-22]: readers get copies by diff, by a stream and as jobs."""
    source, dest = ends
    api = routing.api
    queue = Queue.made(api, f"{dest}.jobs")
    routers = [routing.made(source, topic) for topic in (dest, queue.name)]
    followers = [clients.follow(carrier, api, {dest: {}}) for carrier in ("sse", "ws")]
    api.add(source, "a", "b", tag="t")
    for follower in followers:
        follower.reads(dest, 2)
        assert datas_of(follower.seen[dest]) == ["a", "b"]
    assert datas_of(good(api.diff(dest, wait_ms=1000))["records"]) == ["a", "b"]
    jobs = queue.soon("w", 2)
    assert len(jobs) + len(queue.take("w", 2)) == 2
    routing.settled(*routers)
    assert queue.ack("w", [1, 2])["acked"] == 2
    assert routing.datas(queue.name) == []
    assert routing.datas(dest) == ["a", "b"]


def test_direct_writes_and_copies_share_a_log(routing: Routing, ends: tuple[str, str]) -> None:
    """Contract §6 [6-07, 6-22]"""
    source, dest = ends
    router = routing.made(source, dest)
    for number in range(100):
        routing.api.add(source, number)
        routing.api.add(dest, f"direct {number}")
    routing.settled(router)
    records = routing.api.read_all(dest)
    assert [record["$seq"] for record in records] == list(range(1, 201))
    found = datas_of(records)
    assert [data for data in found if isinstance(data, int)] == list(range(100))
    assert [data for data in found if isinstance(data, str)] == [f"direct {n}" for n in range(100)]


# # --- chains, fans and cycles
# ----------------------------------------------------------------------


def test_chains_and_fans(routing: Routing, names: Names) -> None:
    """Contract §6 [6-01, 6-07]: a chain may be longer than the hop cap, because it has no cycle."""
    stops = [names("stop") for _ in range(12)]
    chain = [routing.made(a, b) for a, b in itertools.pairwise(stops)]
    leaves = [names("leaf") for _ in range(20)]
    fan = [routing.made(stops[0], leaf) for leaf in leaves]
    routing.api.add(stops[0], *range(300))
    routing.settled(*chain, *fan)
    for topic in (stops[-1], *leaves):
        assert routing.datas(topic) == list(range(300))


def test_several_routers_may_join_the_same_two_topics(
    routing: Routing, ends: tuple[str, str]
) -> None:
    """Contract §6 [6-11, 6-17]: the destination still has one source, so this is no fan-in."""
    source, dest = ends
    routers = [
        routing.made(source, dest, f"{dest}.{tag}", filter=["tag", "Eq", tag]) for tag in "ab"
    ]
    for number, tag in enumerate("abcab"):
        routing.api.add(source, number, tag=tag)
    routing.settled(*routers)
    assert sorted(routing.datas(dest)) == [0, 1, 3, 4]
    assert [routing.get(router)["forwarded_total"] for router in routers] == [2, 2]
    assert routing.names(dest=dest) == sorted(routers)


def test_a_destination_has_one_source(routing: Routing, names: Names) -> None:
    """Contract §6 [6-11]: diamonds are refused too; a refused router creates nothing."""
    a, b, c, d = (names(letter) for letter in "abcd")
    for source, dest in ((a, b), (a, c), (b, d)):
        routing.made(source, dest)
    other = names("other")
    for source in (c, a, other):
        for fields in ({}, {"allow_cycle": True}, {"from": "earliest"}):
            answer = routing.put(f"{source}->{d}", source, d, **fields)
            detail = refused(answer, 409, "topic_exists_incompatible")
            assert detail["reason"] == "router_dest_fan_in"
            refused(routing.read(f"{source}->{d}"), 404, "router_not_found")
    refused(routing.api.state(other), 404, "topic_not_found")
    # Without the router any other may use the destination.
    routing.drop(f"{b}->{d}")
    routing.made(c, d)


def test_a_cycle_is_refused_with_its_topics(routing: Routing, names: Names) -> None:
    """Contract §6 [6-19]"""
    a, b, c = (names(letter) for letter in "abc")
    routing.made(a, b)
    routing.made(b, c)

    def is_told(name: str) -> None:
        first, *rest = refused(routing.put(name, c, a), 409, "router_cycle")["cycle"]
        # The list may begin with any topic of the cycle.
        assert rest[-1] == first
        at = rest.index(a)
        assert rest[at:] + rest[:at] == [a, b, c]

    is_told("back")
    refused(routing.read("back"), 404, "router_not_found")
    # A change that closes a cycle is refused like a new router, and changes nothing.
    spare = routing.made(names("x"), names("y"))
    before = routing.get(spare)
    is_told(spare)
    assert {k: before[k] for k in DEFINITION} == {k: routing.get(spare)[k] for k in DEFINITION}


def test_only_the_router_that_closes_a_cycle_needs_allow_cycle(
    routing: Routing, names: Names
) -> None:
    """Contract §6 [6-19, 6-20]: the other routers may be changed as before, but the one with
    `allow_cycle` must keep it.
    """
    a, b = names("a"), names("b")
    there = routing.made(a, b)
    back = routing.made(b, a, allow_cycle=True)
    routing.changed(there, a, b, preserve_tag=False)
    refused(routing.put(back, b, a), 409, "router_cycle")
    assert routing.get(back)["allow_cycle"] is True
    routing.drop(there)
    routing.changed(back, b, a)
    refused(routing.put(there, a, b), 409, "router_cycle")


def test_in_a_cycle_copies_end_at_the_hop_cap(routing: Routing, names: Names) -> None:
    """Contract §6, settled rules [6-20, S-17]"""
    a, b = names("a"), names("b")
    there = routing.made(a, b, allow_cycle=True)
    back = routing.made(b, a, allow_cycle=True)
    assert routing.get(back)["allow_cycle"] is True
    routing.api.add(a, "x", node="n", tag="t")
    for _ in range(HOPS_MAX + 1):
        routing.settled(there, back)
    assert routing.datas(a) == ["x"] * (1 + HOPS_MAX // 2)
    assert routing.datas(b) == ["x"] * (HOPS_MAX // 2)
    assert copied(routing.api.read_all(b)) == [{"$node": "n", "data": "x"}] * 4
    # Records that stop there count as examined: there is no lag.
    assert [routing.get(name)["lag"] for name in (there, back)] == [0, 0]
    routing.api.add(b, "y")
    for _ in range(HOPS_MAX + 1):
        routing.settled(back, there)
    assert routing.datas(a).count("y") == HOPS_MAX // 2
    assert routing.datas(b).count("y") == 1 + HOPS_MAX // 2


def test_a_node_never_gets_back_its_own_records(routing: Routing, names: Names) -> None:
    """Contract §6, §4 [6-34]: the node is kept through a chain of routers, and through a cycle."""
    a, b, c = (names(letter) for letter in "abc")
    circle = [routing.made(a, b, allow_cycle=True), routing.made(b, a, allow_cycle=True)]
    chain = routing.made(b, c)
    routing.api.add(a, 1, node="n1")
    routing.api.add(b, 2, node="n2")
    for _ in range(HOPS_MAX + 1):
        routing.settled(*circle, chain)
    for topic in (a, b, c):
        for node, other in (("n1", 2), ("n2", 1)):
            found = datas_of(routing.api.read_all(topic, node=node))
            assert set(found) == {other}


# --- PUT, GET, list, DELETE -----------------------------------------------------------------------


def test_put_creates_and_replaces(routing: Routing, ends: tuple[str, str]) -> None:
    """Contract §6, settled rules [6-25, 6-26, S-30, 6-08, 9-02]"""
    source, dest = ends
    name = f"{source}->{dest}"
    made = routing.put(name, source, dest)
    assert made.status_code == 201
    told = made.json()
    assert list(told) == ["router", "created", *DEFINITION[1:], "performance"]
    assert told["performance"]["server_total_ms"] >= 0
    plain = {"router": name, "source": source, "dest": dest, **DEFAULTS}
    assert {k: told[k] for k in plain} == plain
    assert told["guarantee"] == "at_least_once"
    again = routing.changed(name, source, dest)
    assert {k: again[k] for k in plain} == plain
    other = {
        **{"preserve_node": False, "preserve_tag": False, "filter": ["tag", "Glob", "a*"]},
        **{"allow_cycle": True, "guarantee": "exactly_once"},
    }
    changed = routing.changed(name, source, dest, **other)
    assert {k: changed[k] for k in other} == other
    assert {k: routing.get(name)[k] for k in other} == other
    # Omitted fields take their defaults.
    back = routing.changed(name, source, dest)
    assert {k: back[k] for k in plain} == plain
    assert routing.names(source=source) == [name]


def test_a_change_applies_to_later_records(routing: Routing, ends: tuple[str, str]) -> None:
    """Contract §6, settled rules [6-25, S-30]"""
    source, dest = ends
    name = routing.made(source, dest)
    api = routing.api
    api.add(source, 1, tag="t", node="n")
    routing.settled(name)
    before = api.read_all(dest, include_tags=True)
    routing.changed(name, source, dest, filter=["tag", "Eq", "x"], preserve_node=False)
    assert routing.get(name)["forwarded_total"] == 1
    api.add(source, 2, tag="t", node="n")
    api.add(source, 3, tag="x", node="n")
    routing.settled(name)
    records = api.read_all(dest, include_tags=True)
    assert records[:1] == before
    assert copied(records[1:]) == [{"$tag": "x", "data": 3}]


def test_a_router_may_be_given_another_destination(routing: Routing, names: Names) -> None:
    """Contract §6 [6-25]: copies made so far stay where they are."""
    source, one, two = names("source"), names("one"), names("two")
    name = routing.made(source, one, names("router"))
    routing.api.add(source, 1)
    routing.settled(name)
    assert routing.changed(name, source, two)["dest"] == two
    routing.api.add(source, 2)
    routing.settled(name)
    assert routing.datas(one) == [1]
    assert routing.datas(two) == [2]
    assert routing.get(name)["forwarded_total"] == 1
    # So the router may begin anywhere, like a new router.
    three = names("three")
    routing.changed(name, source, three, **{"from": "earliest"})
    routing.settled(name)
    assert routing.datas(three) == [1, 2]
    # The first destination is free again.
    routing.made(two, one)


def test_get_has_the_definition_and_the_forwarded_count(
    routing: Routing, ends: tuple[str, str]
) -> None:
    """Contract §6 [6-27, 6-28, 9-02]"""
    source, dest = ends
    refused(routing.read(f"{source}->{dest}"), 404, "router_not_found")
    name = routing.made(source, dest)
    state = routing.get(name)
    assert list(state)[:8] == [*DEFINITION]
    assert state["forwarded_total"] == 0
    assert (state["state"], state["lag"]) == ("running", 0)
    assert "reason" not in state
    routing.api.add(source, 1, 2, 3)
    routing.settled(name)
    state = routing.get(name)
    assert (state["forwarded_total"], state["cursor_seq"], state["lag"]) == (3, 3, 0)


def test_routers_have_a_namespace_of_their_own(routing: Routing, ends: tuple[str, str]) -> None:
    """Contract §6 [6-02]: a router may have the name of a topic without any conflict."""
    source, dest = ends
    api = routing.api
    api.add(source, 1)
    name = routing.made(source, dest, source)
    assert routing.get(name)["router"] == source
    assert api.get_state(source)["head_seq"] == 1
    assert routing.drop(name)["deleted"] is True
    assert api.get_state(source)["head_seq"] == 1
    refused(api.state(f"{source}-{dest}"), 404, "topic_not_found")


@pytest.mark.parametrize("stem", ["a", "9", "A.b_c-d:e", "a->b", "a>", "x>>y"])
def test_names_of_routers(routing: Routing, names: Names, stem: str) -> None:
    """Contract §6, settled rules [6-03]: names may use the charset of topics and `>`, escaped or
    not.
    """
    name = f"{stem}{names('r')}"
    source, dest = names("source"), names("dest")
    body = b'{"source":"%b","dest":"%b"}' % (source.encode(), dest.encode())
    media = ("Content-Type: application/json",)
    for path, status in ((name, 201), (quote(name, safe=""), 200)):
        answer = routing.api.raw("PUT", f"/v0/routers/{path}", body, media)
        assert answer.status == status
        assert answer.json()["router"] == name
        assert routing.api.raw("GET", f"/v0/routers/{path}").json()["router"] == name
    if ">" in name:
        answer = routing.api.raw("PUT", f"/v0/topics/{quote(name, safe='')}", b"{}", media)
        assert refused(answer, 400, "invalid_request")["field"] == "topic"


def test_the_list_shows_and_filters(routing: Routing, names: Names) -> None:
    """Contract §6 [6-29, 9-02]"""
    stem = names("list")
    a, b, c, d = (f"{stem}.{letter}" for letter in "abcd")
    for source, dest in ((a, b), (a, c), (b, d)):
        routing.made(source, dest)
    routing.changed(f"{a}->{c}", a, c, guarantee="exactly_once")
    routing.api.add(a, 1, 2)
    routing.settled(f"{a}->{b}", f"{a}->{c}", f"{b}->{d}")
    rows = routing.rows(prefix=stem)
    assert [list(row) for row in rows] == [
        ["router", "source", "dest", "guarantee", "forwarded_total"]
    ] * 3
    assert [tuple(row.values()) for row in rows] == [
        (f"{a}->{b}", a, b, "at_least_once", 2),
        (f"{a}->{c}", a, c, "exactly_once", 2),
        (f"{b}->{d}", b, d, "at_least_once", 2),
    ]
    assert routing.names(source=a) == [f"{a}->{b}", f"{a}->{c}"]
    assert routing.names(dest=d) == [f"{b}->{d}"]
    assert routing.names(source=a, dest=c, prefix=stem) == [f"{a}->{c}"]
    assert routing.names(source=d) == routing.names(prefix=stem, source=b, dest=c) == []
    assert routing.names(prefix=f"{a}->") == [f"{a}->{b}", f"{a}->{c}"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_the_list_pages_by_a_cursor(routing: Routing, names: Names, size: int) -> None:
    """Contract §6, §0.7 [0.7-06, 6-29, 6-30]"""
    stem = names("page")
    wanted = sorted(routing.made(stem, f"{stem}.{n}") for n in range(7))
    found: list[str] = []
    page = routing.page(source=stem, page_size=size)
    while "next_cursor" in page:
        assert len(page["routers"]) == size
        assert isinstance(page["next_cursor"], str)
        found += [row["router"] for row in page["routers"]]
        page = routing.page(source=stem, page_size=size, cursor=page["next_cursor"])
    found += [row["router"] for row in page["routers"]]
    assert found == wanted
    assert len(page["routers"]) in ({7 % size} if 7 % size else {size})
    assert list(page) == ["routers", "performance"]


def test_a_cursor_outlives_the_router_it_stands_at(routing: Routing, names: Names) -> None:
    """Contract §0.7 [0.7-06]"""
    stem = names("page")
    made = sorted(routing.made(stem, f"{stem}.{n}") for n in range(4))
    page = routing.page(source=stem, page_size=2)
    routing.drop(made[1])
    rest = routing.page(source=stem, cursor=page["next_cursor"])
    assert [row["router"] for row in rest["routers"]] == made[2:]


def test_delete_stops_at_once_and_leaves_copies(routing: Routing, names: Names) -> None:
    """Contract §6 [6-31, 6-32, 9-02]"""
    source, dest, other = names("source"), names("dest"), names("other")
    name, witness = routing.made(source, dest), routing.made(source, other)
    routing.api.add(source, 1, 2)
    routing.settled(name)
    answer = routing.drop(name)
    assert list(answer) == ["router", "deleted", "performance"]
    assert (answer["router"], answer["deleted"]) == (name, True)
    routing.api.add(source, 3)
    routing.settled(witness)
    assert routing.datas(other) == [1, 2, 3]
    assert routing.datas(dest) == [1, 2]
    assert routing.api.get_state(dest)["head_seq"] == 2
    refused(routing.read(name), 404, "router_not_found")
    assert routing.names(source=source) == [witness]
    again = routing.drop(name)
    assert (again["router"], again["deleted"]) == (name, False)


def test_delete_stops_in_the_middle_of_a_backlog(routing: Routing, names: Names) -> None:
    """Contract §6 [6-31]: after the answer the destination gets no more copies."""
    source, dest, other = names("source"), names("dest"), names("other")
    for _ in range(5):
        routing.api.add(source, *("x" * 200 for _ in range(2000)))
    name = routing.made(source, dest, **{"from": "earliest"})
    routing.drop(name)
    head = routing.api.get_state(dest)["head_seq"]
    routing.settled(routing.made(source, other, **{"from": "earliest"}))
    assert routing.api.get_state(dest)["head_seq"] == head <= 10_000


def test_dropping_a_topic_drops_its_routers(routing: Routing, names: Names) -> None:
    """Contract §1.4, §6 [1.4-07, 6-33]"""
    a, b, c, d = (names(letter) for letter in "abcd")
    into, out, both = routing.made(a, b), routing.made(b, c), routing.made(b, d)
    beside = routing.made(c, names("e"))
    routing.api.add(a, 1)
    routing.settled(into, out, both, beside)
    answer = good(routing.api.drop(b))
    assert (answer["deleted"], answer["routers_removed"]) == (True, sorted([into, out, both]))
    for gone in (into, out, both):
        refused(routing.read(gone), 404, "router_not_found")
    assert routing.names(source=a) == routing.names(source=b) == routing.names(dest=b) == []
    assert routing.get(beside)["router"] == beside
    assert routing.datas(c) == routing.datas(d) == [1]
    again = good(routing.api.drop(b))
    assert (again["deleted"], again["routers_removed"]) == (False, [])
    # A new topic of the old name is neither a source nor a destination of the dropped router.
    routing.api.add(b, "new")
    routing.api.add(a, 2)
    witness = routing.made(a, names("f"), **{"from": "earliest"})
    routing.settled(witness)
    assert routing.datas(b) == ["new"]
    assert routing.datas(c) == [1]


def test_if_empty_keeps_the_routers_of_a_topic_it_does_not_drop(
    routing: Routing, ends: tuple[str, str]
) -> None:
    """Contract §1.4 [1.4-07]"""
    source, dest = ends
    name = routing.made(source, dest)
    routing.api.add(source, 1)
    refused(routing.api.drop(source, if_empty=True), 409, "topic_not_empty")
    routing.settled(name)
    assert routing.datas(dest) == [1]


@pytest.mark.parametrize("gone", ["source", "dest"])
def test_a_topic_made_again_is_forwarded_by_a_router_made_again(
    routing: Routing, ends: tuple[str, str], gone: str
) -> None:
    """Contract §6 [6-33, 6-06]: forwarding begins with the new topic's first record."""
    source, dest = ends
    name = routing.made(source, dest, guarantee="exactly_once")
    routing.api.add(source, 1, 2, 3)
    routing.settled(name)
    dropped = source if gone == "source" else dest
    assert good(routing.api.drop(dropped))["routers_removed"] == [name]
    if gone == "source":
        routing.api.add(source, 4)
    again = routing.made(source, dest, guarantee="exactly_once", **{"from": "earliest"})
    routing.settled(again)
    routing.api.add(source, 5)
    routing.settled(again)
    assert routing.datas(dest) == ([1, 2, 3, 4, 5] if gone == "source" else [1, 2, 3, 5])


# --- where it starts, what it creates -------------------------------------------------------------


def test_a_new_router_starts_at_the_head_by_default(routing: Routing, names: Names) -> None:
    """Settled rules of the contract [S-31]"""
    source = names("source")
    routing.api.add(source, *range(1000))
    good(routing.api.delete(source, before_seq=11))
    made: dict[str, str] = {}
    for start in ("", "head", "earliest"):
        made[start] = names("dest")
        given: Any = {"from": start} if start else {}
        routing.made(source, made[start], **given)
    state = routing.get(f"{source}->{made['head']}")
    assert (state["cursor_seq"], state["lag"], state["forwarded_total"]) == (1000, 0, 0)
    routing.api.add(source, 1000)
    routing.settled(*(f"{source}->{dest}" for dest in made.values()))
    assert routing.datas(made[""]) == routing.datas(made["head"]) == [1000]
    assert routing.datas(made["earliest"]) == list(range(10, 1001))


def test_from_moves_no_router_that_is_there(routing: Routing, ends: tuple[str, str]) -> None:
    """Settled rules of the contract [S-31, 6-25]"""
    source, dest = ends
    routing.api.add(source, 1)
    name = routing.made(source, dest)
    routing.changed(name, source, dest, **{"from": "earliest"})
    routing.api.add(source, 2)
    routing.settled(name)
    assert routing.datas(dest) == [2]


def test_topics_that_are_missing_are_made(routing: Routing, names: Names) -> None:
    """Contract §6 [6-16]"""
    api = routing.api
    source, dest = names("source"), names("dest")
    routing.made(source, dest)
    for topic in (source, dest):
        state = api.get_state(topic)
        assert (state["type"], state["head_seq"], state["count"]) == ("log", 0, 0)
    there = names("there")
    good(api.put(there, {"cap_records": 9, "type": "queue"}))
    routing.made(source, there)
    assert api.get_state(there)["config"]["cap_records"] == 9


def test_create_dest_false_wants_the_destination_there(routing: Routing, names: Names) -> None:
    """Contract §6 [6-16]: a refused request creates neither the destination nor the source."""
    api = routing.api
    source, dest = names("source"), names("dest")
    answer = routing.put("r", source, dest, create_dest=False)
    refused(answer, 404, "topic_not_found")
    for topic in (source, dest):
        refused(api.state(topic), 404, "topic_not_found")
    refused(routing.read("r"), 404, "router_not_found")
    good(api.put(dest))
    name = routing.made(source, dest, create_dest=False)
    assert "create_dest" not in routing.get(name)
    api.add(source, 1)
    routing.settled(name)
    assert routing.datas(dest) == [1]


# --- the destination's own rules ------------------------------------------------------------------


def test_an_append_does_not_wait_for_its_copies(routing: Routing, names: Names) -> None:
    """Contract §6 [6-04]: the append does not wait even if a copy cannot be made."""
    source, full, other = names("source"), names("full"), names("other")
    good(routing.api.put(full, {"cap_records": 1, "discard": "reject"}))
    routing.api.add(full, "there")
    stuck, free = routing.made(source, full), routing.made(source, other)
    started = time.monotonic()
    for number in range(50):
        routing.api.add(source, number)
    assert time.monotonic() - started < 10
    assert routing.stalled(stuck)["forwarded_total"] == 0
    routing.settled(free)
    assert routing.datas(other) == list(range(50))
    assert routing.get(free)["state"] == "running"


def test_a_full_destination_that_evicts_makes_room(routing: Routing, ends: tuple[str, str]) -> None:
    """Contract §6 [6-23]"""
    source, dest = ends
    good(routing.api.put(dest, {"cap_records": 10}))
    name = routing.made(source, dest)
    for first in range(0, 500, 5):
        routing.api.add(source, *range(first, first + 5))
    routing.settled(name)
    page = routing.api.read(dest)
    kept = datas_of(page["records"])
    assert 1 <= len(kept) <= 10
    assert kept == list(range(500 - len(kept), 500))
    assert page["tombstone"]["reason"] == "cap"
    assert page["head_seq"] == 500
    assert routing.get(name)["forwarded_total"] == 500


def test_a_full_destination_that_refuses_holds_its_router_up(
    routing: Routing, ends: tuple[str, str]
) -> None:
    """Contract §6 [6-24]: no record is lost or overtakes another, and the state has the reason of
    the stall.
    """
    source, dest = ends
    api = routing.api
    good(api.put(dest, {"cap_records": 3, "discard": "reject"}))
    name = routing.made(source, dest)
    for number in range(8):
        api.add(source, number)
    state = routing.stalled(name)
    assert state["reason"]["code"] == "topic_full"
    assert state["reason"]["message"]
    copied_so_far = api.get_state(dest)["count"]
    assert copied_so_far <= 3
    assert (state["cursor_seq"], state["lag"]) == (copied_so_far, 8 - copied_so_far)
    for _ in range(8):
        if len(routing.datas(dest)) == 0:
            break
        seen = api.read_all(dest)
        good(api.delete(dest, before_seq=seen[-1]["$seq"] + 1))
        eventually(
            lambda: routing.get(name)["lag"] == 0 or api.get_state(dest)["count"] > 0,
            "it goes on where there is room",
        )
        if routing.get(name)["lag"] == 0:
            break
    good(api.put(dest))
    routing.settled(name)
    state = routing.get(name)
    assert (state["state"], state["forwarded_total"]) == ("running", 8)
    assert "reason" not in state
    # Seqs show that each record was copied once and in order, also those deleted since.
    assert api.get_state(dest)["head_seq"] == 8
    assert [r["data"] + 1 for r in api.read_all(dest)] == [r["$seq"] for r in api.read_all(dest)]


def test_losses_of_the_source_before_forwarding_are_reported(
    routing: Routing, ends: tuple[str, str]
) -> None:
    """Contract §3.3, §6, settled rules [3.3-09, 6-24]: one seq of the destination stands for the
    lost range.
    """
    source, dest = ends
    api = routing.api
    good(api.put(source, {"cap_records": 4}))
    good(api.put(dest, {"cap_records": 1, "discard": "reject"}))
    api.add(dest, "there")
    name = routing.made(source, dest)
    for number in range(20):
        api.add(source, number)
    routing.stalled(name)
    lost = good(api.diff(source))["tombstone"]["gap_to"]
    kept = routing.datas(source)
    assert 16 <= lost < 20
    good(api.put(dest))
    routing.settled(name)
    page = api.read(dest, from_seq=1)
    tombstone = page["tombstone"]
    assert tombstone["reason"] == "source_trim"
    assert tombstone["gap_from"] == tombstone["gap_to"] == 2
    assert tombstone["missed_estimate"] == lost
    records = api.read_all(dest, from_seq=2)
    assert datas_of(records) == kept
    assert [record["$seq"] for record in records] == list(range(3, 3 + len(kept)))
    assert api.read(dest, from_seq=2)["tombstone"] is None


@pytest.mark.parametrize("carrier", ["sse", "ws"])
def test_a_watcher_gets_the_losses_of_the_source(
    routing: Routing, ends: tuple[str, str], clients: Clients, carrier: str
) -> None:
    """Contract §3.3, §7 [3.3-09]: the tombstone comes live and in later reads, at its place between
    the records.
    """
    source, dest = ends
    api = routing.api
    good(api.put(source, {"cap_records": 1}))
    good(api.put(dest, {"cap_records": 1, "discard": "reject"}))
    api.add(dest, "there")
    live = clients.follow(carrier, api, {dest: {}})
    name = routing.made(source, dest)
    for number in range(5):
        api.add(source, number)
    routing.stalled(name)
    good(api.put(dest))
    routing.settled(name)
    head = api.get_state(dest)["head_seq"]
    for follower in (live, clients.follow(carrier, api, {dest: {}})):
        follower.reads(dest, head)
        assert datas_of(follower.seen[dest]) == ["there", *routing.datas(source)]
        [gap] = follower.gaps[dest]
        assert (gap.reason, gap.gap_from, gap.gap_to) == ("source_trim", 2, 2)


def test_records_deleted_before_they_were_forwarded_are_gone_in_silence(
    routing: Routing, ends: tuple[str, str]
) -> None:
    """Contract §6, §5 [6-24, 3.3-09]"""
    source, dest = ends
    api = routing.api
    good(api.put(dest, {"cap_records": 1, "discard": "reject"}))
    api.add(dest, "there")
    name = routing.made(source, dest)
    for number in range(6):
        api.add(source, number, tag=f"t{number % 2}")
    routing.stalled(name)
    good(api.delete(source, match="t0"))
    good(api.put(dest))
    routing.settled(name)
    page = api.read(dest, from_seq=1)
    assert page["tombstone"] is None
    assert datas_of(page["records"]) == [1, 3, 5]


def test_a_copy_depends_on_nothing_that_happens_to_its_source(
    routing: Routing, names: Names
) -> None:
    """Contract §6 [6-01, 6-31]: deletes, caps, another filter and a dropped topic are covered."""
    source, dest = names("source"), names("dest")
    api = routing.api
    name = routing.made(source, dest)
    api.add(source, *range(10), tag="t")
    routing.settled(name)
    before = api.read_all(dest)
    good(api.delete(source, match="t"))
    good(api.put(source, {"cap_records": 1}))
    api.add(source, 10, 11)
    routing.settled(name)
    routing.changed(name, source, dest, filter=["tag", "Eq", "none"])
    good(api.drop(source))
    found = api.read_all(dest)
    assert found[:10] == before
    assert datas_of(found)[10:] in ([10, 11], [11])


# --- exactly once ---------------------------------------------------------------------------------


def test_exactly_once_stamps_a_stable_key(routing: Routing, names: Names) -> None:
    """Contract §6 [6-08, 6-09, 6-21]: each copy has one key, beside the user's own meta."""
    source, once, least = names("source"), names("once"), names("least")
    api = routing.api
    first = routing.made(source, once, guarantee="exactly_once")
    second = routing.made(source, least, guarantee="at_least_once")
    assert routing.get(first)["guarantee"] == "exactly_once"
    assert routing.get(second)["guarantee"] == "at_least_once"
    api.add(source, 1, 2, meta={"k": [1]})
    api.add(source, 3)
    routing.settled(first, second)
    records = api.read_all(once)
    stamps = [record["meta"]["_topics_router"] for record in records]
    assert len({str(stamp) for stamp in stamps}) == 3
    rest = [{k: v for k, v in r["meta"].items() if k != "_topics_router"} for r in records]
    assert rest == [{"k": [1]}, {"k": [1]}, {}]
    assert [record.get("meta") for record in api.read_all(least)] == [{"k": [1]}, {"k": [1]}, None]


def test_exactly_once_skips_records_that_the_destination_still_holds(
    routing: Routing, ends: tuple[str, str]
) -> None:
    """Contract §6 [6-09, 6-10]: a router made again from the beginning catches up without doubling;
    a copy that was deleted meanwhile does not count as held.
    """
    source, dest = ends
    api = routing.api
    name = routing.made(source, dest, guarantee="exactly_once")
    api.add(source, *range(6))
    routing.settled(name)
    before = api.read_all(dest)
    routing.drop(name)
    api.add(source, 6)
    again = {"guarantee": "exactly_once", "from": "earliest"}
    routing.made(source, dest, **again)
    routing.settled(name)
    records = api.read_all(dest)
    assert records[:6] == before
    assert datas_of(records) == list(range(7))
    good(api.delete(dest, before_seq=3))
    routing.drop(name)
    routing.made(source, dest, **again)
    routing.settled(name)
    assert datas_of(api.read_all(dest)) == [2, 3, 4, 5, 6, 0, 1]


def test_at_least_once_copies_again_when_it_is_made_again(
    routing: Routing, ends: tuple[str, str]
) -> None:
    """Contract §6 [6-08, 6-09]"""
    source, dest = ends
    name = routing.made(source, dest)
    routing.api.add(source, 1, 2)
    routing.settled(name)
    routing.drop(name)
    routing.made(source, dest, **{"from": "earliest"})
    routing.settled(name)
    assert routing.datas(dest) == [1, 2, 1, 2]


# --- limits and figures ---------------------------------------------------------------------------


def test_the_number_of_routers_can_be_capped(own: NewServer) -> None:
    """Contract §11 [11-03, 11-12, 11-13]: a refused router leaves no topic; existing ones can be
    changed.
    """
    api = own(TOPICS_MAX_ROUTERS="2").start()
    routing = Routing(api)
    routing.made("a", "b")
    routing.made("a", "c")
    answer = routing.put("x->y", "x", "y")
    detail = refused(answer, 429, "throttled")
    assert (detail["limit"], detail["max"]) == ("max_routers", 2)
    assert int(answer.headers["retry-after"]) >= 0
    for topic in "xy":
        refused(api.state(topic), 404, "topic_not_found")
    assert routing.changed("a->b", "a", "b", filter=["tag", "Eq", "t"])["filter"]
    routing.drop("a->c")
    routing.made("x", "y")


def test_no_cap_is_no_cap(own: NewServer) -> None:
    """Contract §11 [11-03]"""
    routing = Routing(own(TOPICS_MAX_ROUTERS="0").start())
    for number in range(50):
        routing.made("a", f"b{number}")
    assert len(routing.rows()) == 50


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_router_refused_by_the_number_of_topics_leaves_nothing(own: NewServer, most: int) -> None:
    """Contract §11 [11-03, 11-02]: if only one of its two topics would fit, neither is created."""
    api = own(TOPICS_MAX_TOPICS=str(most)).start()
    routing = Routing(api)
    for number in range(most - 1):
        good(api.put(f"there{number}"))
    answer = routing.put("a->b", "a", "b")
    assert refused(answer, 429, "throttled")["limit"] == "max_topics"
    assert routing.names() == []
    for topic in "ab":
        refused(api.state(topic), 404, "topic_not_found")
    if most > 1:
        routing.made("there0", "b")
        answer = routing.put("b->c", "b", "c")
        refused(answer, 429, "throttled")
        assert routing.names() == ["there0->b"]


def _figures(api: Api) -> Json:
    answer = api.http.get("/v0/metrics", headers={"Accept": "application/json"})
    return good(answer)


def test_figures_of_routers(own: NewServer) -> None:
    """Contract §8.3 [8.3-04]"""
    api = own().start()
    routing = Routing(api)
    assert _figures(api)["topics_routers"] == 0
    good(api.put("full", {"cap_records": 1, "discard": "reject"}))
    api.add("full", 0)
    stuck, free = routing.made("a", "full"), routing.made("a", "b")
    api.add("a", 1, 2)
    routing.settled(free)
    routing.stalled(stuck)
    figures = _figures(api)
    assert figures["topics_routers"] == 2

    def figure(name: str) -> dict[str, int]:
        return {each["labels"]["router"]: each["value"] for each in figures[name]}

    assert figure("topics_router_forwarded_total") == {free: 2, stuck: 0}
    assert figure("topics_router_lag") == {free: 0, stuck: 2}
    assert figure("topics_router_stalled") == {free: 0, stuck: 1}
    lines = api.http.get("/v0/metrics").text.splitlines()
    assert "topics_routers 2.0" in lines
    assert f'topics_router_forwarded_total{{router="{free}"}} 2.0' in lines
    routing.drop(free)
    assert _figures(api)["topics_routers"] == 1


def test_a_copy_costs_no_second_write_of_its_payload(own: NewServer) -> None:
    """Contract §6 [6-05]: the test counts the bytes written to the journal, for destinations that
    their routers created.
    """
    # No checkpoint begins in between: after one, a page must carry payloads that replay may no
    # longer find.
    api = own(TOPICS_CHECKPOINT_INTERVAL_MS="86400000", TOPICS_WAL_SHARDS="2").start()
    routing = Routing(api)
    fan = [routing.made("a", f"b{number}") for number in range(5)]
    chain = [routing.made("b0", "c"), routing.made("c", "d")]

    def cost(size: int) -> int:
        before: int = _figures(api)["topics_wal_bytes_written_total"]
        for _ in range(20):
            api.add("a", "x" * size)
        routing.settled(*fan, *chain)
        after: int = _figures(api)["topics_wal_bytes_written_total"]
        return after - before - 20 * size

    small, large = cost(1_000), cost(100_000)
    assert large < small + 200_000, "seven copies of 20 records of 100 kB are 14 MB"
    for topic in ("a", "b4", "d"):
        assert [len(data) for data in routing.datas(topic)] == [1_000] * 20 + [100_000] * 20
