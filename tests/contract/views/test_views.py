"""Views: tables that follow a topic (view-consistency.md), with read-your-writes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import ROOT, Api, good, refused
from tests.contract.views.following import COUNTS, ROWS, Viewing

Names = Callable[[str], str]


@pytest.fixture
def viewing(api: Api, topic: str) -> Viewing:
    """The views of a new topic."""
    good(api.put(topic))
    return Viewing(api, topic)


# --- read-your-writes -----------------------------------------------------------------------------


def test_a_query_with_after_reflects_that_record(viewing: Viewing) -> None:
    """Read consistency: with `after` the answer reflects every record up to it, each time.

    [V-01, V-05]
    """
    view = viewing.made("counts", COUNTS)
    for number in range(1, 301):
        added = viewing.api.add(viewing.topic, number, tag=f"t{number % 7}")
        sql = "SELECT sum(count) FROM counts"
        answer = good(viewing.query(view, after=added["last_seq"], sql=sql))
        assert answer["rows"] == [[number]]
        assert answer["processed_sequence"] == number


def test_a_query_beyond_the_head_times_out_in_the_contracts_words(own: NewServer) -> None:
    """The answer is 504 with the target and the view's position; the server sets the time limit.
    [V-07, V-08]
    """
    api = own(TOPICS_VIEW_AFTER_MS="300").start()
    good(api.put("t"))
    viewing = Viewing(api, "t")
    view = viewing.made("my-view", COUNTS)
    api.add("t", 1, 2, 3, tag="a")
    viewing.caught_up(view)
    began = time.monotonic()
    answer = viewing.query(view, after=42, query="all")
    assert time.monotonic() - began >= 0.3
    detail = refused(answer, 504, "view_timeout")
    assert answer.json()["error"]["message"] == (
        "Timeout waiting for view my-view to catch up (target: 42, current: 3)"
    )
    assert detail == {"view": "my-view", "target": 42, "current": 3}


def test_four_seconds_is_the_default_patience(viewing: Viewing) -> None:
    """Timeout specification: 4 seconds, enforced by the server. [V-07]"""
    view = viewing.made("slow", COUNTS)
    began = time.monotonic()
    refused(viewing.query(view, after=1, query="all"), 504, "view_timeout")
    assert 4.0 <= time.monotonic() - began < 8.0


def test_after_is_never_stale_under_concurrent_appends(own: NewServer) -> None:
    """32 clients append and query with `after`: every answer has the client's own record. [V-05]"""
    api = own().start()
    good(api.put("t"))
    viewing = Viewing(api, "t")
    view = viewing.made("rows", ROWS)
    stale: list[str] = []

    def client(number: int) -> None:
        with httpx.Client(base_url=api.url, timeout=60, trust_env=False) as http:
            for turn in range(20):
                data = f"{number}-{turn}"
                seq = good(http.post("/v0/topics/t", json={"records": [{"data": data}]}))
                asked = {
                    "sql": "SELECT data FROM rows WHERE seq = :seq",
                    "params": {"seq": seq["last_seq"]},
                }
                url = viewing.url(view, f"query?after={seq['last_seq']}")
                answer = good(http.post(url, json=asked))
                if answer["rows"] != [[json.dumps(data)]]:
                    stale.append(f"{data}: {answer}")

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(client, range(32)))
    assert stale == []
    assert viewing.caught_up(view)["processed_sequence"] == 32 * 20


def test_a_query_without_after_answers_at_once(viewing: Viewing) -> None:
    """The answer to a stale read names the last record that it reflects. [V-06]"""
    view = viewing.made("rows", ROWS)
    answer = good(viewing.query(view, query="all"))
    assert answer["rows"] == []
    assert answer["processed_sequence"] == 0
    assert answer["columns"] == ["seq", "tag", "data"]
    assert answer["truncated"] is False


def test_stats_tell_what_the_contract_names(viewing: Viewing) -> None:
    """View statistics: view_name, processed_sequence, leader_status. [V-10]"""
    view = viewing.made("my-view", COUNTS)
    viewing.api.add(viewing.topic, *range(42), tag="a")
    stats = viewing.caught_up(view)
    assert stats["view_name"] == "my-view"
    assert stats["processed_sequence"] == 42
    assert stats["leader_status"] == "ready"
    assert stats["last_error"] is None


# --- definitions ----------------------------------------------------------------------------------


def test_a_view_is_defined_shown_listed_and_deleted(viewing: Viewing) -> None:
    """PUT, GET, list, DELETE; a shortcut is shown as the SQL it stands for."""
    created = viewing.put("counts", COUNTS)
    assert created.status_code == 201
    again = viewing.put("counts", COUNTS)
    assert again.status_code == 200
    assert again.json()["changed"] is False
    shown = good(viewing.api.http.get(viewing.url("counts")))
    assert shown["shortcut"] == {"count_by_tag": True}
    assert shown["apply"][0].startswith("INSERT INTO counts")
    assert shown["stats"]["view_name"] == "counts"
    listed = good(viewing.api.http.get(f"/v0/topics/{viewing.topic}/views"))
    assert [view["view"] for view in listed["views"]] == ["counts"]
    dropped = good(viewing.api.http.delete(viewing.url("counts")))
    assert dropped["deleted"] is True
    assert good(viewing.api.http.delete(viewing.url("counts")))["deleted"] is False
    refused(viewing.api.http.get(viewing.url("counts")), 404, "view_not_found")


def test_a_changed_definition_answers_once_it_has_caught_up(viewing: Viewing) -> None:
    """Queries get the old rows until the new ones are complete: no answer shows a state between."""
    api = viewing.api
    view = viewing.made("v", ROWS)
    for first in range(0, 20_000, 1_000):
        api.add(viewing.topic, *range(first, first + 1_000))
    viewing.caught_up(view)
    twice = ROWS | {
        "apply": "INSERT INTO rows VALUES (:seq, 'new', :node, :data, :meta)",
    }
    changed = good(viewing.put(view, twice))
    assert changed["changed"] is True
    seen: Counter[str] = Counter()
    while True:
        [[count, tag]] = viewing.rows(view, "SELECT count(*), max(tag) FROM rows")
        assert count == 20_000
        seen[str(tag)] += 1
        if tag == "new":
            break
        time.sleep(0.005)
    assert viewing.caught_up(view)["rebuilds_total"] == 1


def test_the_definition_in_the_docs_works(viewing: Viewing) -> None:
    """The body that docs/VIEWS.md shows."""
    page = (ROOT / "docs" / "VIEWS.md").read_text(encoding="utf-8")
    body = json.loads(page.partition("```json\n")[2].partition("```")[0])
    view = viewing.made("revenue", body)
    for amount, tag in ((5, "paid"), (7, "paid"), (100, "open")):
        seq = viewing.api.add(viewing.topic, {"amount": amount}, tag=tag)["last_seq"]
    [[_, total]] = viewing.rows(view, after=seq)
    assert total == 12


def test_ignored_members_are_told(viewing: Viewing) -> None:
    """The answer names a misspelt member."""
    answer = good(viewing.put("v", COUNTS | {"on_delet": "rebuild"}))
    assert answer["ignored"] == ["on_delet"]


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ({}, "apply is missing"),
        ({"apply": ""}, "no statement"),
        ({"apply": "INSERT INTO t VALUES (1)", "shortcut": {"count_by_tag": True}}, "not both"),
        ({"shortcut": {}}, "one member"),
        ({"shortcut": {"nope": True}}, "one of latest_by_tag"),
        ({"shortcut": {"count_by_tag": False}}, "must be true"),
        ({"shortcut": {"latest_by_key": "id"}}, "JSON pointer"),
        ({"shortcut": {"latest_by_key": '/a"b'}}, "quotation mark"),
        ({"shortcut": {"timeseries": {}}}, "bucket"),
        ({"shortcut": {"timeseries": {"bucket": 0}}}, "between 1"),
        ({"shortcut": {"timeseries": {"bucket": "1 hour"}}}, "duration"),
        ({"shortcut": {"timeseries": {"bucket": 1, "other": 1}}}, "other"),
        ({"apply": "SELECT 1", "queries": {"a b": "SELECT 1"}}, "query's name"),
        ({"apply": "SELECT 1", "queries": {"a": "SELECT 1; SELECT 2"}}, "one statement"),
        ({"apply": "SELECT 1", "queries": {"a": "DELETE FROM t"}}, "must begin with SELECT"),
        ({"apply": "SELECT 1", "on_delete": "maybe"}, "on_delete"),
        ({"apply": ["SELECT 1"] * 65}, "at most 64 statements"),
        ({"apply": "SELECT '" + "x" * 40_000 + "'"}, "characters of SQL"),
        ({"apply": "SELECT 1\0"}, "NUL"),
        ({"apply": 1}, "apply"),
    ],
)
def test_a_bad_definition_is_refused(
    viewing: Viewing, definition: dict[str, object], words: str
) -> None:
    """The answer is 400 with the field, and no view is made."""
    answer = viewing.put("bad", definition)
    refused(answer, 400, "invalid_request")
    assert words in answer.json()["error"]["message"]
    refused(viewing.api.http.get(viewing.url("bad")), 404, "view_not_found")


@pytest.mark.parametrize("sql", ["SELECT nope FROM nowhere", "SELEC 1", "INSERT INTO t VALUES"])
def test_sql_that_is_wrong_is_told_in_the_databases_words(viewing: Viewing, sql: str) -> None:
    """The answer is 400 `query_failed` or `invalid_request`, and names the statement."""
    answer = viewing.put("bad", {"schema": "CREATE TABLE t (a)", "apply": sql})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("query_failed", "invalid_request")


def test_names_and_positions_are_checked(viewing: Viewing) -> None:
    """A malformed name, `after` or parameter gets its own refusal."""
    refused(viewing.put("a%20b", COUNTS), 400, "invalid_request")
    refused(viewing.put("x" * 65, COUNTS), 400, "invalid_request")
    view = viewing.made("v", COUNTS)
    http = viewing.api.http
    for after in ("", "-1", "x", "1.5"):
        url = viewing.url(view, f"query?after={after}")
        refused(http.post(url, json={"query": "all"}), 400, "invalid_request")
    for body in ({}, {"sql": "SELECT 1", "query": "all"}, {"query": "nope"}, {"sql": 1}):
        refused(http.post(viewing.url(view, "query"), json=body), 400, "invalid_request")
    wrong = {"sql": "SELECT :a", "params": {"a": {"b": 1}}}
    refused(http.post(viewing.url(view, "query"), json=wrong), 400, "invalid_request")
    wide = {"sql": "SELECT :a", "params": {"a": 2**63}}
    refused(http.post(viewing.url(view, "query"), json=wide), 400, "invalid_request")
    missing = {"sql": "SELECT :a", "params": {}}
    refused(http.post(viewing.url(view, "query"), json=missing), 400, "query_failed")
    nowhere = f"/v0/topics/{viewing.topic}-none/views/v"
    refused(http.put(nowhere, json=COUNTS), 404, "topic_not_found")


def test_the_numbers_of_views_are_bounded(own: NewServer) -> None:
    """The answer is 429 with the limit; an existing view may still be changed."""
    api = own(TOPICS_MAX_VIEWS="3", TOPICS_MAX_VIEWS_PER_TOPIC="2").start()
    for name in ("a", "b", "c"):
        good(api.put(name))
    first = Viewing(api, "a")
    for name in ("v1", "v2"):
        first.made(name, COUNTS)
    error = refused(first.put("v3", COUNTS), 429, "throttled")
    assert error == {"limit": "max_views_per_topic", "max": 2}
    Viewing(api, "b").made("v", COUNTS)
    error = refused(Viewing(api, "c").put("v", COUNTS), 429, "throttled")
    assert error == {"limit": "max_views", "max": 3}
    good(first.put("v1", ROWS))


def test_a_prefix_has_as_many_views_as_topics(own: NewServer) -> None:
    """The 429 names the prefix; other prefixes have room, and deleting a view makes room again."""
    server = own(
        TOPICS_API_KEYS=_keys("boss:admin+read+write+delete,a:admin+read+write:a."),
        TOPICS_MAX_TOPICS_PER_PREFIX="2",
    )
    api = server.start()
    boss = {"authorization": f"Bearer {_key('boss')}"}
    http = api.http
    for topic in ("a.1", "b.1"):
        good(http.put(f"/v0/topics/{topic}", json={}, headers=boss))
        for view in ("v", "w"):
            url = f"/v0/topics/{topic}/views/{view}"
            good(http.put(url, json=COUNTS, headers=boss))
    third = "/v0/topics/a.1/views/third"
    error = refused(http.put(third, json=COUNTS, headers=boss), 429, "throttled")
    assert error == {"limit": "max_topics_per_prefix", "max": 2, "prefix": "a."}
    good(http.put("/v0/topics/b.1/views/third", json=COUNTS, headers=boss))
    good(http.delete("/v0/topics/a.1/views/v", headers=boss))
    good(http.put(third, json=COUNTS, headers=boss))


def test_a_key_that_may_only_read_defines_nothing(own: NewServer) -> None:
    """Defining a view needs `admin`, a query needs `read`; a key's prefix hides the views of other
    topics.
    """
    keys = "reader:read:t,boss:admin+read+write+delete,other:admin+read:x"
    server = own(TOPICS_API_KEYS=_keys(keys))
    api = server.start()
    boss = {"authorization": f"Bearer {_key('boss')}"}
    reader = {"authorization": f"Bearer {_key('reader')}"}
    other = {"authorization": f"Bearer {_key('other')}"}
    http = api.http
    good(http.put("/v0/topics/t", json={}, headers=boss))
    url = "/v0/topics/t/views/v"
    refused(http.put(url, json=COUNTS, headers=reader), 403, "forbidden")
    refused(http.put(url, json=COUNTS, headers=other), 403, "forbidden")
    good(http.put(url, json=COUNTS, headers=boss))
    good(http.post(f"{url}/query", json={"query": "all"}, headers=reader))
    refused(http.post(f"{url}/query", json={"query": "all"}, headers=other), 403, "forbidden")
    refused(http.post(f"{url}/query", json={"query": "all"}), 401, "unauthorized")
    refused(http.post(f"{url}/rebuild", json={}, headers=reader), 403, "forbidden")
    refused(http.delete(url, headers=reader), 403, "forbidden")


def _key(name: str) -> str:
    return f"{name}-" + "k" * 32


def _keys(rules: str) -> str:
    return ",".join(
        f"{_key(rule.split(':')[0])}:{rule.split(':', 1)[1]}" for rule in rules.split(",")
    )


# --- records that come, go and fail ---------------------------------------------------------------


def test_every_record_counts_once_with_all_it_has(viewing: Viewing) -> None:
    """Parameters: seq, ts, node, tag, data and meta, verbatim; absent ones are NULL. [V-02]"""
    api = viewing.api
    view = viewing.made("rows", ROWS)
    body = (
        b'{"records":[{"data":{ "n" : 1e400, "u":"\\u00e9" },"tag":"a","node":"n1",'
        b'"meta":{"k": 1}},{"data":null}]}'
    )
    sent = {"content-type": "application/json"}
    good(api.http.post(f"/v0/topics/{viewing.topic}", content=body, headers=sent))
    rows = viewing.rows(view, "SELECT * FROM rows ORDER BY seq", after=2)
    assert rows == [
        [1, "a", "n1", '{ "n" : 1e400, "u":"\\u00e9" }', '{"k": 1}'],
        [2, None, None, "null", None],
    ]


def test_bytes_of_a_stream_are_a_blob(viewing: Viewing) -> None:
    """`:data` of a binary record is a BLOB; an answer shows it in base64."""
    name = f"{viewing.topic}-bytes"
    http = viewing.api.http
    sent = {"content-type": "application/octet-stream"}
    assert http.put(f"/v1/stream/{name}", content=b"\x00\xff", headers=sent).status_code == 201
    other = Viewing(viewing.api, name)
    view = other.made("rows", ROWS)
    rows = other.rows(view, "SELECT typeof(data), data FROM rows", after=1)
    assert rows == [["blob", {"base64": "AP8="}]]


def test_a_record_that_fails_stops_the_view_and_loses_nothing(viewing: Viewing) -> None:
    """The stats name record, statement and error; the view continues once its definition is fixed
    or the record is skipped.
    """
    api, topic = viewing.api, viewing.topic
    strict = ROWS | {
        "schema": "CREATE TABLE rows (seq INTEGER PRIMARY KEY, tag, node, data UNIQUE, meta)"
    }
    view = viewing.made("v", strict)
    api.add(topic, "a", "b", "a", "c")
    failed = viewing.until(view, lambda stats: stats["last_error"] is not None)
    assert failed["status"] == "failed"
    assert failed["processed_sequence"] == 2
    assert failed["last_error"]["seq"] == 3
    assert "UNIQUE" in failed["last_error"]["message"]
    assert failed["last_error"]["statement"].startswith("INSERT INTO rows")
    assert [row[0] for row in viewing.rows(view)] == [1, 2]
    refused(viewing.rebuild(view, skip=4), 400, "invalid_request")
    good(viewing.rebuild(view, skip=3))
    viewing.caught_up(view)
    assert [row[0] for row in viewing.rows(view)] == [1, 2, 4]
    # A corrected definition does the same.
    good(viewing.put(view, ROWS))
    viewing.until(view, lambda stats: stats["status"] == "ready" and stats["lag"] == 0)
    assert [row[0] for row in viewing.rows(view)] == [1, 2, 3, 4]


def test_what_is_deleted_stays_unless_the_view_rebuilds(viewing: Viewing) -> None:
    """`on_delete`: `keep` is the default; with `rebuild` the view soon shows only the remaining
    records.
    """
    api, topic = viewing.api, viewing.topic
    kept = viewing.made("kept", ROWS)
    anew = viewing.made("anew", ROWS | {"on_delete": "rebuild"})
    api.add(topic, *range(10), tag="old")
    api.add(topic, *range(5), tag="new")
    for view in (kept, anew):
        viewing.caught_up(view)
    good(api.delete(topic, match="old"))
    viewing.until(anew, lambda stats: stats["rebuilds_total"] >= 1 and stats["status"] == "ready")
    assert [row[1] for row in viewing.rows(anew)] == ["new"] * 5
    assert len(viewing.rows(kept)) == 15
    good(viewing.rebuild(kept))
    viewing.until(kept, lambda stats: stats["rebuilds_total"] == 1 and stats["status"] == "ready")
    assert len(viewing.rows(kept)) == 5


def test_a_queue_cannot_rebuild_on_deletes(api: Api, topic: str) -> None:
    """Every ack deletes a record: 400."""
    good(api.put(topic, {"type": "queue"}))
    viewing = Viewing(api, topic)
    refused(viewing.put("v", ROWS | {"on_delete": "rebuild"}), 400, "invalid_request")
    view = viewing.made("v", ROWS)
    api.add(topic, 1, 2)
    assert len(viewing.rows(view, after=2)) == 2


def test_a_view_over_a_trimmed_log_says_from_where_it_knows(api: Api, topic: str) -> None:
    """`known_from_seq`: records below it were evicted before the view saw them."""
    good(api.put(topic, {"cap_records": 10}))
    api.add(topic, *range(100))
    viewing = Viewing(api, topic)
    view = viewing.made("v", ROWS)
    stats = viewing.caught_up(view)
    assert stats["known_from_seq"] == 91
    assert [row[0] for row in viewing.rows(view)] == list(range(91, 101))


def test_a_topic_that_is_made_again_resets_its_views(viewing: Viewing) -> None:
    """The definition stays; the rows are those of the present topic."""
    api, topic = viewing.api, viewing.topic
    view = viewing.made("v", ROWS)
    api.add(topic, *range(10), tag="first")
    viewing.caught_up(view)
    good(api.drop(topic))
    refused(viewing.query(view, query="all"), 404, "topic_not_found")
    api.add(topic, 1, 2, tag="second")
    rows = viewing.rows(view, after=2)
    assert [row[1] for row in rows] == ["second", "second"]


# --- queries --------------------------------------------------------------------------------------


def test_a_named_query_by_url_has_a_tag(viewing: Viewing) -> None:
    """GET with `p.` parameters; the answer is 304 while the view has applied no new record."""
    api, topic = viewing.api, viewing.topic
    view = viewing.made("counts", COUNTS)
    api.add(topic, 1, 2, tag="a")
    viewing.caught_up(view)
    url = viewing.url(view, "query/get")
    first = api.http.get(url, params={"p.tag": "a"})
    assert good(first)["rows"][0][:2] == ["a", 2]
    tag = first.headers["etag"]
    unchanged = api.http.get(url, params={"p.tag": "a"}, headers={"if-none-match": tag})
    assert unchanged.status_code == 304
    api.add(topic, 3, tag="a")
    moved = api.http.get(url, params={"p.tag": "a", "after": "3"}, headers={"if-none-match": tag})
    assert good(moved)["rows"][0][:2] == ["a", 3]
    assert moved.headers["etag"] != tag
    refused(api.http.get(viewing.url(view, "query/nope")), 400, "invalid_request")


def test_rows_are_bounded_and_the_cut_is_told(viewing: Viewing) -> None:
    """An answer has at most 10,000 rows or 4 MiB; a single row that is larger is refused."""
    view = viewing.made("v", ROWS)
    numbers = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 20000) "
    answer = good(viewing.query(view, sql=numbers + "SELECT x FROM c"))
    assert answer["row_count"] == 10_000
    assert answer["truncated"] is True
    wide = good(viewing.query(view, sql=numbers + "SELECT hex(zeroblob(50000)) FROM c LIMIT 100"))
    assert wide["truncated"] is True
    assert wide["row_count"] == 41
    error = refused(viewing.query(view, sql="SELECT hex(zeroblob(3000000))"), 400, "query_failed")
    assert error["reason"] == "size"


def test_a_runaway_query_ends_and_nobody_else_notices(own: NewServer) -> None:
    """When its time is up, the query gets 400 with the reason; appends and other queries continue
    meanwhile.
    """
    api = own(TOPICS_VIEW_QUERY_MS="4000").start()
    good(api.put("t"))
    viewing = Viewing(api, "t")
    view = viewing.made("v", ROWS)
    runaway = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c"
    ended: list[httpx.Response] = []

    def run() -> None:
        with httpx.Client(base_url=api.url, timeout=60, trust_env=False) as http:
            ended.append(http.post(viewing.url(view, "query"), json={"sql": runaway}))

    thread = threading.Thread(target=run)
    thread.start()
    done = 0
    while thread.is_alive() and done < 4:
        seq = api.add("t", done)["last_seq"]
        assert len(viewing.rows(view, "SELECT 1", after=seq)) == 1
        done += 1
    is_beside = not ended
    thread.join()
    assert is_beside
    error = refused(ended[0], 400, "query_failed")
    assert error["reason"] == "time"
    assert done == 4


def test_queries_run_in_so_many_processes(own: NewServer) -> None:
    """One process answers one query at a time; a second setting adds a second process."""
    server = own(TOPICS_VIEW_QUERY_PROCESSES="3")
    api = server.start()
    good(api.put("t"))
    viewing = Viewing(api, "t")
    view = viewing.made("v", ROWS)
    slow = (
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 300000) "
        "SELECT count(*) FROM c"
    )

    def ask(_number: int) -> int:
        with httpx.Client(base_url=api.url, timeout=60, trust_env=False) as http:
            return http.post(viewing.url(view, "query"), json={"sql": slow}).status_code

    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(ask, range(12))) == {200}
    assert server.process is not None
    # The fourth process applies records.
    assert len(_helpers_of(server.process.pid)) == 4


def test_a_view_that_fills_its_file_stands_still(own: NewServer) -> None:
    """The size of a view's file is bounded; a full view still answers queries, and its error is
    reported.
    """
    api = own(TOPICS_VIEW_MAX_BYTES="1MiB").start()
    good(api.put("t"))
    viewing = Viewing(api, "t")
    view = viewing.made("v", ROWS)
    for _ in range(20):
        api.add("t", "x" * 100_000)
    failed = viewing.until(view, lambda stats: stats["last_error"] is not None)
    assert "full" in failed["last_error"]["message"]
    assert failed["last_error"]["seq"] == 0
    assert len(viewing.rows(view)) == failed["processed_sequence"]


def test_a_query_that_needs_too_much_memory_ends(viewing: Viewing) -> None:
    """The heap of a query process is bounded; the process answers the next query."""
    view = viewing.made("v", ROWS)
    greedy = (
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 40) "
        "SELECT length(group_concat(hex(zeroblob(4000000)) || x)) FROM c"
    )
    error = refused(viewing.query(view, sql=greedy), 400, "query_failed")
    assert error["reason"] in ("memory", "sql")
    assert viewing.rows(view, "SELECT 1") == [[1]]


def test_figures_of_views(own: NewServer) -> None:
    """Metrics: what each view processed, its lag and failure; queries and their timeouts."""
    api = own(TOPICS_VIEW_AFTER_MS="200").start()
    good(api.put("t"))
    viewing = Viewing(api, "t")
    view = viewing.made("v", COUNTS)
    seq = api.add("t", 1, 2, 3, tag="a")["last_seq"]
    viewing.caught_up(view)
    viewing.rows(view, after=seq)
    refused(viewing.query(view, after=99, query="all"), 504, "view_timeout")
    shown = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
    one = [{"labels": {"view": "t/v"}, "value": 3.0}]
    assert [shown["topics_views"], shown["topics_views_failed"], shown["topics_view_lag_max"]] == [
        1,
        0,
        0,
    ]
    assert shown["topics_view_applied_total"] == shown["topics_view_processed_seq"] == one
    assert shown["topics_view_queries_total"] == 1
    assert shown["topics_view_timeouts_total"] == 1
    assert shown["topics_view_bytes"][0]["value"] > 0
    text = api.http.get("/v0/metrics").text
    assert 'topics_view_lag{view="t/v"} 0.0' in text
    assert "topics_view_query_us_count 1.0" in text


def test_a_live_query_sends_rows_when_they_change(viewing: Viewing) -> None:
    """Server-sent events: the rows at once, then again only when they differ."""
    api, topic = viewing.api, viewing.topic
    view = viewing.made("counts", COUNTS)
    events: list[tuple[str, dict[str, object]]] = []
    with api.http.stream("GET", viewing.url(view, "live?query=all")) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        events.append(_event(lines))
        assert events[0][1]["rows"] == []
        api.add(topic, 1, tag="a")
        events.append(_event(lines))
        # Untagged records do not count: the rows are the same, nothing is sent.
        api.add(topic, 2)
        time.sleep(0.3)
        api.add(topic, 3, tag="a")
        events.append(_event(lines))
    counts = [[row[:2] for row in event["rows"]] for _, event in events[1:]]  # type: ignore[attr-defined]
    assert counts == [[["a", 1]], [["a", 2]]]
    assert events[2][0] == "3"


def _event(lines: object) -> tuple[str, dict[str, object]]:
    """The next `rows` event: its id and its data."""
    found: dict[str, str] = {}
    for line in lines:  # type: ignore[attr-defined]
        if line:
            name, _, value = line.partition(": ")
            found[name] = value
        elif found.get("event") == "rows":
            return found["id"], json.loads(found["data"])
        else:
            found = {}
    raise AssertionError("the stream ended")


# --- restarts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_views_go_on_behind_a_restart(own: NewServer, how: signal.Signals) -> None:
    """Definitions and rows survive the restart; no record counts twice, none is missing. [V-03]"""
    server = own()
    api = server.start()
    good(api.put("t", {"durability": "memory"}))
    viewing = Viewing(api, "t")
    counts, rows = viewing.made("counts", COUNTS), viewing.made("rows", ROWS)
    total = 0
    for round_ in range(4):
        for _ in range(20):
            api.add("t", *range(50), tag=f"t{round_}")
            total += 50
        if round_ == 2:
            good(viewing.put(rows, ROWS | {"queries": {"n": "SELECT count(*) FROM rows"}}))
        server.signal(how)
        api = server.start()
        viewing = Viewing(api, "t")
    assert viewing.rows(counts, "SELECT sum(count) FROM counts", after=total) == [[total]]
    assert viewing.rows(rows, "SELECT count(*), max(seq) FROM rows", after=total) == [
        [total, total]
    ]
    good(api.http.delete(viewing.url("counts")))
    server.signal(how)
    api = server.start()
    refused(api.http.get(viewing.url("counts")), 404, "view_not_found")


def test_a_view_file_that_is_damaged_or_gone_is_built_anew(own: NewServer) -> None:
    """A view is never a reason to refuse a start, and its rows come back."""
    server = own()
    api = server.start()
    good(api.put("t"))
    viewing = Viewing(api, "t")
    view = viewing.made("v", ROWS)
    api.add("t", *range(100))
    viewing.caught_up(view)
    for damage in ("remove", "damage", "empty"):
        server.signal(signal.SIGTERM)
        [path] = (server.data_dir / "views").glob("*/*.db")
        if damage == "remove":
            path.unlink()
        elif damage == "empty":
            path.write_bytes(b"")
        else:
            path.write_bytes(b"x" * path.stat().st_size)
        api = server.start()
        viewing = Viewing(api, "t")
        viewing.caught_up(view)
        assert len(viewing.rows(view)) == 100


def test_a_file_ahead_of_its_log_is_built_anew(own: NewServer) -> None:
    """Records that a crash removed from the log disappear from the view; an ephemeral topic loses
    all of them.
    """
    server = own()
    api = server.start()
    good(api.put("t", {"durability": "ephemeral"}))
    viewing = Viewing(api, "t")
    view = viewing.made("v", ROWS)
    api.add("t", *range(100), tag="lost")
    viewing.caught_up(view)
    server.signal(signal.SIGKILL)
    api = server.start()
    viewing = Viewing(api, "t")
    seq = api.add("t", "kept", tag="kept")["last_seq"]
    rows = viewing.rows(view, after=seq)
    assert [row[1] for row in rows] == ["kept"]


def test_the_helpers_may_be_killed_at_any_time(own: NewServer) -> None:
    """The server starts the processes again; rows and answers are correct. [V-03]"""
    server = own()
    api = server.start()
    good(api.put("t"))
    viewing = Viewing(api, "t")
    view = viewing.made("v", ROWS)
    total = 0
    for _ in range(8):
        total = api.add("t", *range(500))["last_seq"]
        assert server.process is not None
        for pid in _helpers_of(server.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        answer = viewing.query(view, after=total, sql="SELECT count(*) FROM rows")
        if answer.status_code == 400:  # the killed process ran this query
            assert answer.json()["error"]["detail"]["reason"] == "memory"
    viewing.caught_up(view)
    rows = viewing.rows(view, "SELECT count(*), max(seq) FROM rows", after=total)
    assert rows == [[total, total]]


def _helpers_of(pid: int) -> list[int]:
    """The processes of views below a server."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return [child for child in found if _is_helper(child)]


def _is_helper(pid: int) -> bool:
    """Whether this process still runs and is a helper process of views."""
    try:
        return b"topics_server.views" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_view_behind_a_rebuild_equals_a_fold(viewing: Viewing) -> None:
    """The rows of an incremental view, of a rebuilt one, and computed in plain Python are the same.
    [V-04]
    """
    api, topic = viewing.api, viewing.topic
    series = viewing.made(
        "series", {"shortcut": {"timeseries": {"bucket": 50, "sum": ["/amount"], "by_tag": True}}}
    )
    latest = viewing.made("latest", {"shortcut": {"latest_by_key": "/key"}})
    for number in itertools.count():
        if number == 40:
            break
        records = [
            {"data": {"key": (number * 7 + n) % 13, "amount": n}, "tag": f"t{n % 3}"}
            for n in range(25)
        ]
        good(api.append(topic, records))
    head = api.get_state(topic)["head_seq"]
    before = [viewing.rows(view, after=head) for view in (series, latest)]
    for view in (series, latest):
        good(viewing.rebuild(view))
        viewing.until(view, lambda stats: stats["rebuilds_total"] and stats["status"] == "ready")
    assert [viewing.rows(view, after=head) for view in (series, latest)] == before
    sums: Counter[tuple[int, str]] = Counter()
    newest: dict[int, int] = {}
    for record in api.read_all(topic, include_tags=True):
        sums[record["$ts"] // 50 * 50, record["$tag"]] += record["data"]["amount"]
        newest[record["data"]["key"]] = record["$seq"]
    found = {(bucket, tag): total for bucket, tag, _, total in before[0]}
    assert found == dict(sums)
    assert {row[0]: row[1] for row in before[1]} == newest
