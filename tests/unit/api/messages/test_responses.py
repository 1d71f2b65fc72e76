"""Responses: their members, their order, and payloads verbatim."""

from __future__ import annotations

import json
from array import array

import msgspec
import pytest

from topics_server.api.messages.responses import (
    page_performance,
    render_appended,
    render_config,
    render_deleted,
    render_dropped,
    render_json,
    render_page,
    render_put,
    render_router,
    render_router_dropped,
    render_router_put,
    render_routers,
    render_state,
    render_topics,
)
from topics_server.engine.answers import (
    Appended,
    Deleted,
    Gap,
    Page,
    Piece,
    PutOutcome,
    TopicPage,
    TopicState,
)
from topics_server.values.blocks import make_block
from topics_server.values.json_cache import DATA, META, JsonCache
from topics_server.values.model import (
    Durability,
    Guarantee,
    LossReason,
    RouterDefinition,
    TagMatch,
    TopicConfig,
)
from topics_server.values.router_answers import RouterListPage, RouterOutcome, RouterState

TIME_MS = 1_748_450_001_000


def page_bytes(page: Page, shown: int = META | DATA) -> bytes:
    parts = render_page("jobs", page, shown, JsonCache())
    return b"".join([*parts, page_performance(0.5, page.scanned)])


def piece(first_seq: int, rows: list[int], count: int = 4) -> Piece:
    block = make_block(
        first_seq,
        array("q", [TIME_MS] * count),
        [b'{"v": 1.0e400}'] * count,
        [b""] * count,
        [None] * count,
        [None] * count,
    )
    return Piece(block, rows)


def state(**changed: object) -> TopicState:
    return msgspec.structs.replace(
        TopicState(
            name="jobs",
            topic_id=3,
            epoch=1,
            config=TopicConfig(),
            head_seq=10,
            earliest_seq=4,
            evict_floor=2,
            count=7,
            bytes=70,
            disk_bytes=4096,
            effective_priority=500,
            last_write_ts=TIME_MS,
            last_read_ts=None,
        ),
        **changed,
    )


def test_an_append_s_answer_lists_its_seqs() -> None:
    done = Appended(5, 7, 9, created=True, write_ms=0.1, sync_ms=0.25)
    assert json.loads(render_appended("jobs", done, with_seqs=True, total_ms=1.5)) == {
        "topic": "jobs",
        "first_seq": 5,
        "last_seq": 7,
        "seqs": [5, 6, 7],
        "head_seq": 9,
        "count": 3,
        "created": True,
        "deduped": False,
        "performance": {
            "server_total_ms": 1.5,
            "wal_append_ms": 0.1,
            "fsync_ms": 0.25,
            "throttle_wait_ms": 0.0,
        },
    }


def test_the_seqs_can_be_left_out() -> None:
    told = json.loads(render_appended("jobs", Appended(5, 5, 5), with_seqs=False, total_ms=0.0))
    assert "seqs" not in told
    assert (told["first_seq"], told["last_seq"], told["count"]) == (5, 5, 1)


def test_one_seq_is_a_list_of_one() -> None:
    told = json.loads(render_appended("jobs", Appended(5, 5, 5), with_seqs=True, total_ms=0.0))
    assert told["seqs"] == [5]


def test_a_page_joins_its_pieces_and_keeps_payloads() -> None:
    page = Page([piece(1, [0, 1, 3]), piece(9, [2])], 12, 20, 1, scanned=12)
    body = page_bytes(page)
    assert body.count(b'"data":{"v": 1.0e400}') == 4
    told = json.loads(body)
    assert [record["$seq"] for record in told["records"]] == [1, 2, 4, 11]
    assert list(told) == [
        *("topic", "records", "next_from_seq", "head_seq", "earliest_seq", "caught_up"),
        *("tombstone", "lag", "epoch", "performance"),
    ]
    assert (told["next_from_seq"], told["lag"], told["caught_up"]) == (12, 8, False)
    assert told["performance"]["records_scanned"] == 12


def test_an_empty_page_is_caught_up_at_the_head() -> None:
    told = json.loads(page_bytes(Page([], 20, 20, 21)))
    assert told["records"] == []
    assert (told["caught_up"], told["lag"], told["tombstone"]) == (True, 0, None)


@pytest.mark.parametrize("reason", list(LossReason))
def test_a_tombstone_has_its_range_its_reason_and_the_watermarks(reason: LossReason) -> None:
    told = json.loads(page_bytes(Page([], 6, 20, 7, gap=Gap(1, 6, reason, 5))))
    assert told["tombstone"] == {
        "gap_from": 1,
        "gap_to": 6,
        "reason": reason.value,
        "missed_estimate": 5,
        "earliest_seq": 7,
        "head_seq": 20,
    }


def test_a_configuration_has_17_fields_in_the_contract_s_order() -> None:
    told = json.loads(render_config(TopicConfig(durability=Durability.FSYNC, priority=-3)))
    assert list(told) == [
        *("type", "ttl_ms", "cap_records", "cap_bytes", "discard", "durable", "durability"),
        *("priority", "auto_priority", "auto_create", "idempotency_window_ms", "dedupe_node"),
        *("lease_ms", "claim_jitter_ms", "max_deliveries", "dead_letter", "leases_durable"),
    ]
    assert (told["durable"], told["durability"], told["priority"]) == (True, "fsync", -3)
    told = json.loads(render_config(TopicConfig(lease_log="leases")))
    assert (len(told), told["lease_log"]) == (18, "leases")


def test_a_state_has_every_field() -> None:
    told = json.loads(render_state(state(), 0.05))
    config = told.pop("config")
    assert config == json.loads(render_config(TopicConfig()))
    assert told == {
        "topic": "jobs",
        "epoch": 1,
        "type": "log",
        "head_seq": 10,
        "earliest_seq": 4,
        "next_seq": 11,
        "count": 7,
        "bytes": 70,
        "disk_bytes": 4096,
        "damaged_records": 0,
        "effective_priority": 500,
        "last_write_ts": TIME_MS,
        "last_read_ts": None,
        "performance": {"server_total_ms": 0.05},
    }


def test_a_list_shows_a_summary_and_its_cursor() -> None:
    page = TopicPage([state(config=TopicConfig(durability=Durability.FSYNC))])
    told = json.loads(render_topics(page, "abc=", 0.1))
    assert told["next_cursor"] == "abc="
    assert told["topics"] == [
        {
            "topic": "jobs",
            "epoch": 1,
            "head_seq": 10,
            "earliest_seq": 4,
            "count": 7,
            "bytes": 70,
            "durable": True,
            "effective_priority": 500,
        }
    ]
    assert "next_cursor" not in json.loads(render_topics(TopicPage([]), None, 0.1))


def test_put_delete_and_drop_have_their_members() -> None:
    put = json.loads(render_put("jobs", PutOutcome(TopicConfig()), 0.1))
    assert set(put) == {"topic", "created", "config", "performance"}
    deleted = json.loads(render_deleted("jobs", Deleted(3, 4, 9, 6, 60), 0.1))
    assert (deleted["deleted"], deleted["earliest_seq"], deleted["head_seq"]) == (3, 4, 9)
    assert (deleted["count"], deleted["bytes"]) == (6, 60)
    dropped = json.loads(render_dropped("jobs", False, [], 0.1))
    assert (dropped["deleted"], dropped["routers_removed"]) == (False, [])
    dropped = json.loads(render_dropped("jobs", True, ["a->jobs"], 0.1))
    assert (dropped["deleted"], dropped["routers_removed"]) == (True, ["a->jobs"])
    assert "performance" in render_json({}, 1.0).decode()


# -- routers -----------------------------------------------------------------------------------

DEFINITION = RouterDefinition("orders", "audit")
MEMBERS = ["source", "dest", "preserve_node", "preserve_tag", "filter", "allow_cycle", "guarantee"]


def test_a_router_s_put_has_the_members_and_order_of_the_contract() -> None:
    body = render_router_put("orders->audit", RouterOutcome(True, DEFINITION, 0.25, 0.5), 1.0)
    told = json.loads(body)
    assert list(told) == ["router", "created", *MEMBERS, "performance"]
    performance = told.pop("performance")
    assert (performance["wal_append_ms"], performance["fsync_ms"]) == (0.25, 0.5)
    assert told == {
        "router": "orders->audit",
        "created": True,
        "source": "orders",
        "dest": "audit",
        "preserve_node": True,
        "preserve_tag": True,
        "filter": None,
        "allow_cycle": False,
        "guarantee": "at_least_once",
    }


@pytest.mark.parametrize(
    ("match", "shown"),
    [
        (None, None),
        (TagMatch("a*b"), ["tag", "Eq", "a*b"]),
        (TagMatch("public:", is_prefix=True), ["tag", "Glob", "public:*"]),
        (TagMatch("", is_prefix=True), ["tag", "Glob", "*"]),
        (TagMatch('"\u2028'), ["tag", "Eq", '"\u2028']),
    ],
)
def test_a_filter_is_shown_as_the_tuple_it_was(
    match: TagMatch | None, shown: list[str] | None
) -> None:
    definition = msgspec.structs.replace(
        DEFINITION, filter=match, guarantee=Guarantee.EXACTLY_ONCE, preserve_node=False
    )
    told = json.loads(render_router(RouterState("r", definition, 1, 2, 3), 0.1))
    assert told["filter"] == shown
    assert (told["guarantee"], told["preserve_node"]) == ("exactly_once", False)


def test_a_router_that_stands_still_says_why() -> None:
    running = json.loads(render_router(RouterState("r", DEFINITION, 7, 9, 2), 0.1))
    place = ["forwarded_total", "cursor_seq", "lag", "state"]
    assert list(running) == ["router", *MEMBERS, *place, "performance"]
    assert [running[name] for name in place] == [7, 9, 2, "running"]
    stalled = RouterState("r", DEFINITION, 7, 9, 2, ("topic_full", "no room"))
    told = json.loads(render_router(stalled, 0.1))
    assert list(told) == ["router", *MEMBERS, *place, "reason", "performance"]
    assert told["state"] == "stalled"
    assert told["reason"] == {"code": "topic_full", "message": "no room"}


def test_a_list_of_routers_has_rows_and_a_cursor_where_more_follow() -> None:
    page = RouterListPage([RouterState("r", DEFINITION, 7, 9, 2)])
    told = json.loads(render_routers(page, None, 0.1))
    assert list(told) == ["routers", "performance"]
    assert [list(row) for row in told["routers"]] == [
        ["router", "source", "dest", "guarantee", "forwarded_total"]
    ]
    assert list(json.loads(render_routers(page, "x", 0.1))) == [
        *("routers", "next_cursor", "performance")
    ]
    dropped = json.loads(render_router_dropped("r", False, 0.1))
    assert list(dropped) == ["router", "deleted", "performance"]
