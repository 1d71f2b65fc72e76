"""`api/queues/responses`: jobs verbatim, counters, frames of the push stream."""

from __future__ import annotations

import json
from array import array

import pytest

from topics_server.api.queues.responses import (
    job_frame,
    render_acked,
    render_claimed,
    render_extended,
    render_job,
    render_leases,
    render_nacked,
    render_redriven,
)
from topics_server.engine.answers import QueueCounts
from topics_server.engine.read.exact_read import row_of
from topics_server.engine.read.row_columns import RowColumns
from topics_server.queue.answers import (
    AckResult,
    ExtendResult,
    FirstLeases,
    LeasedJob,
    LeasePage,
    NackResult,
    Redriven,
)
from topics_server.queue.leases.jobs import LeaseView, SkipReason, lease_numbers
from topics_server.values.blocks import Block, make_block
from topics_server.values.record_codecs import bytes_meta

COUNTS = QueueCounts(840, 286, 3, 4)


def block() -> Block:
    return make_block(
        7,
        array("q", [10, 20]),
        [b'{ "a" : 1e400 }', b"null"],
        [b'{"m": 1}', b""],
        ['t"ag', None],
        ["nöde", None],
    )


def job(row: int) -> LeasedJob:
    return LeasedJob(7 + row, 0xABC, 30_010, 2, block(), row)


def test_a_job_has_its_record_verbatim_and_omits_what_is_absent() -> None:
    assert (
        render_job(job(0))
        == (
            '"$seq":7,"lease_id":"lease_abc","deadline":30010,"$ts":10,"$node":"nöde","$tag":"t\\"ag",'
            '"deliveries":2,"data":{ "a" : 1e400 },"meta":{"m": 1}'
        ).encode()
    )
    assert render_job(job(1)) == (
        b'"$seq":8,"lease_id":"lease_abc","deadline":30010,"$ts":20,"deliveries":2,"data":null'
    )


def test_a_job_of_bytes_is_base64_and_says_what_it_is() -> None:
    metas = [bytes_meta("image/png"), bytes_meta("a/b")[:-1] + b',"$dead_letter_from":"jobs"}']
    made = make_block(
        7, array("q", [10, 20]), [b"\x00\xff\r\n", b""], metas, [None] * 2, [None] * 2
    )
    assert render_job(LeasedJob(7, 0xABC, 30_010, 2, made, 0)) == (
        b'"$seq":7,"lease_id":"lease_abc","deadline":30010,"$ts":10,"deliveries":2,'
        b'"$encoding":"base64","$content_type":"image/png","data":"AP8NCg=="'
    )
    assert render_job(LeasedJob(8, 0xABC, 30_010, 2, made, 1)).endswith(
        b'"$content_type":"a/b","data":"","meta":{"$dead_letter_from":"jobs"}'
    )


def test_a_claim() -> None:
    told = json.loads(render_claimed("jobs", [job(0), job(1)], 840, 0.42))
    assert told["performance"] == {"server_total_ms": 0.42, "throttle_wait_ms": 0.0}
    assert (told["topic"], told["count"], told["ready"]) == ("jobs", 2, 840)
    assert [claimed["$seq"] for claimed in told["claimed"]] == [7, 8]
    assert json.loads(render_claimed("jobs", [], 0, 0.1))["claimed"] == []


def test_a_claim_of_first_leases_reads_like_any_other() -> None:
    metas = [b'{"m": 1}', b"", bytes_meta("image/png")]
    datas = [b'{ "a" : 1e400 }', b"null", b"\x00\xff\r\n"]
    tags, nodes = ['t"ag', None, None], ["nöde", None, None]
    made = make_block(7, array("q", [10, 20, 30]), datas, metas, tags, nodes)
    general = [LeasedJob(7 + row, 0xABC + row, 30_010, 1, made, row) for row in range(3)]
    columns = RowColumns()
    columns.add_block(made, range(3))
    rows = [row_of(made, row) for row in range(3)]
    assert list(columns.rows()) == rows
    for records in (rows, columns):
        leased = FirstLeases([7, 8, 9], records, 0xABC, 30_010, 840)
        assert render_claimed("jobs", leased, 840, 0.42, 0.1) == render_claimed(
            "jobs", general, 840, 0.42, 0.1
        )
    none = FirstLeases([], [], 0, 30_010, 0)
    assert render_claimed("jobs", none, 0, 0.1) == render_claimed("jobs", [], 0, 0.1)


@pytest.mark.parametrize("shown", ["plain", "times", "labels", "metas", "marks", "everything"])
def test_jobs_rendered_by_one_format_read_like_jobs_rendered_one_by_one(shown: str) -> None:
    count, is_all = 40, shown == "everything"
    times = array(
        "q", [10 + row // 7 if is_all or shown == "times" else 10 for row in range(count)]
    )
    tags: list[str | None] = [None] * count
    nodes: list[str | None] = [None] * count
    metas = [b""] * count
    if is_all or shown == "labels":
        tags[3:9] = ["%d", "", 't"ag', "%d", None, "x"]
        nodes[5:30:5] = ["nöde"] * 5
    if is_all or shown == "metas":
        metas[::3] = [b'{"m":"%b"}'] * 14
    if is_all or shown == "marks":
        metas[7] = bytes_meta("image/png")
    datas = [b'{"100%%":"%d"}' % row for row in range(count)]
    made = make_block(7, times, datas, metas, tags, nodes)
    rows = [row for row in range(2, count) if row % 11 or not is_all]
    records = RowColumns()
    records.add_block(made, rows)
    assert list(records.rows()) == [row_of(made, row) for row in rows]
    seqs = [7 + row for row in rows]
    general = [
        LeasedJob(seq, 0xFFE + index, 30_010, 1, made, seq - 7) for index, seq in enumerate(seqs)
    ]
    leased = FirstLeases(seqs, records, 0xFFE, 30_010, 840)
    expected = render_claimed("jobs", general, 840, 0.42)
    assert render_claimed("jobs", leased, 840, 0.42) == expected
    assert json.loads(expected)["count"] == len(rows)


@pytest.mark.parametrize(
    "first_seq", [1, 960, 961, 999, 1_000, 1_960, 1_961, 123_456_000, 2**62 - 2**62 % 1000 - 3]
)
@pytest.mark.parametrize(
    "first_id", [1, 0xFD8, 0xFD9, 0x1000, 0x1FD8, 0x1FD9, 2**63, 2**64 - 41, 2**64 - 0x1000]
)
def test_digits_that_all_jobs_share_are_written_like_those_of_each(
    first_seq: int, first_id: int
) -> None:
    count = 40
    rows = range(count)
    made = make_block(
        first_seq,
        array("q", [10] * count),
        [b"%d" % row for row in rows],
        None,
        [None] * count,
        [None] * count,
    )
    records = RowColumns()
    records.add_block(made, rows)
    general = [LeasedJob(first_seq + row, first_id + row, 30_010, 1, made, row) for row in rows]
    seqs = [first_seq + row for row in rows]
    leased = FirstLeases(seqs, records, first_id, 30_010, 840)
    expected = render_claimed("jobs", general, 840, 0.42)
    assert render_claimed("jobs", leased, 840, 0.42) == expected
    tokens = [job["lease_id"] for job in json.loads(expected)["claimed"]]
    assert lease_numbers(tokens) == [first_id + row for row in rows]


def test_a_frame_has_the_seq_as_id_and_no_bare_line_break() -> None:
    assert job_frame("jobs", job(1)) == (
        b'id: 8\nevent: job\ndata: {"topic":"jobs","$seq":8,"lease_id":"lease_abc",'
        b'"deadline":30010,"$ts":20,"deliveries":2,"data":null}\n\n'
    )
    broken = make_block(1, array("q", [1]), [b"[1,\r\n2,\r3]"], None, [None], [None])
    framed = job_frame("jobs", LeasedJob(1, 1, 2, 1, broken, 0))
    assert framed.endswith(b'"data":[1,\ndata: 2,\ndata: 3]}\n\n')


def test_ack_nack_and_extend() -> None:
    acked = json.loads(
        render_acked("jobs", AckResult(2, [5], COUNTS, [SkipReason.NOT_FOUND], 0.5, 2.25), 3.0)
    )
    assert acked == {
        **{"topic": "jobs", "acked": 2, "skipped": [5], "ready": 840, "in_flight": 286},
        "reasons": {"5": "not_found"},
        "performance": {"server_total_ms": 3.0, "wal_append_ms": 0.5, "fsync_ms": 2.25},
    }
    nacked = json.loads(render_nacked("jobs", NackResult(1, [], COUNTS, []), 0.18))
    assert nacked == {
        **{"topic": "jobs", "nacked": 1, "skipped": [], "ready": 840, "in_flight": 286},
        "performance": {"server_total_ms": 0.18},
    }
    extended = json.loads(
        render_extended("jobs", ExtendResult([3, 4], 99, [5], [SkipReason.ACKING]), 0.12)
    )
    assert extended == {
        **{"topic": "jobs", "extended": 2, "skipped": [5], "deadlines": {"3": 99, "4": 99}},
        "reasons": {"5": "acking"},
        "performance": {"server_total_ms": 0.12},
    }


def test_leases_and_redrive() -> None:
    lease = LeaseView(5, 0xFF, "w", 1_000, 3, 900, 7)
    told = json.loads(render_leases("jobs", LeasePage([lease]), "next", 0.1))
    assert told["leases"] == [
        {
            **{"seq": 5, "node": "w", "lease_id": "lease_ff", "deadline": 1_000},
            **{"deliveries": 3, "claimed_ts": 900},
        }
    ]
    assert told["next_cursor"] == "next"
    assert "next_cursor" not in json.loads(render_leases("jobs", LeasePage([]), None, 0.1))
    told = json.loads(render_redriven("jobs", Redriven("dead", 2, [9], True, 8), 0.5))
    told.pop("performance")
    assert told == {
        **{"topic": "jobs", "from": "dead", "redriven": 2, "skipped": [9], "more": True},
        "next_after_seq": 8,
    }
