"""§4: a node does not get its own records back."""

from __future__ import annotations

import pytest

from tests.contract.driver import Api, Json, good

NODES = ["a", "A", "ab", "a ", "ä", "", None, "b"]


@pytest.fixture
def mixed(api: Api, topic: str) -> str:
    """A topic with one record of each of `NODES`; `data` is the node."""
    records: list[Json] = [
        {"data": node} if node is None else {"data": node, "node": node} for node in NODES
    ]
    good(api.append(topic, records))
    return topic


def _data(api: Api, topic: str, node: object) -> list[object]:
    return [r["data"] for r in api.read_all(topic, node=node)]


@pytest.mark.parametrize("node", ["a", "A", "ab", "a ", "ä", "b"])
def test_only_the_very_same_node_is_left_out(api: Api, mixed: str, node: str) -> None:
    """Contract §4 [4-01, 4-02, 4-05]"""
    assert _data(api, mixed, node) == [n for n in NODES if n != node]


@pytest.mark.parametrize("node", ["c", "aa", "a*", "*", "%", "b\u0308"])
def test_another_node_sees_everything(api: Api, mixed: str, node: str) -> None:
    """Contract §4 [4-02, 4-05]"""
    assert _data(api, mixed, node) == NODES


def test_several_nodes_are_left_out_together(api: Api, mixed: str) -> None:
    """Contract §4, §3 [4-03, 3-04]"""
    assert _data(api, mixed, ["a", "b", "nobody"]) == [n for n in NODES if n not in ("a", "b")]
    assert _data(api, mixed, ["a"]) == [n for n in NODES if n != "a"]
    assert _data(api, mixed, []) == NODES


def test_records_without_a_node_reach_everybody(api: Api, mixed: str) -> None:
    """Contract §4 [4-05]"""
    everyone = [n for n in NODES if n is not None]
    assert None in _data(api, mixed, everyone)


def test_filtering_is_silent_and_moves_the_cursor(api: Api, topic: str) -> None:
    """Contract §4 [4-04]"""
    api.append(topic, [{"data": n} for n in range(5)], node="me")
    page = api.read(topic, node="me")
    assert page["tombstone"] is None
    assert page["records"] == []
    assert (page["next_from_seq"], page["caught_up"], page["lag"]) == (5, True, 0)


def test_two_nodes_that_share_a_topic_see_each_others_records(api: Api, topic: str) -> None:
    """Contract §4 [4-01]"""
    for number in range(6):
        api.add(topic, number, node="left" if number % 2 else "right")
    assert _data(api, topic, "left") == [0, 2, 4]
    assert _data(api, topic, "right") == [1, 3, 5]


def test_a_topic_may_opt_out(api: Api, mixed: str) -> None:
    """Contract §4, §0.10 [4-06, 0.10-30]"""
    api.put(mixed, {"dedupe_node": False})
    assert _data(api, mixed, "a") == NODES
    api.put(mixed, {})
    assert _data(api, mixed, "a") == [n for n in NODES if n != "a"]
