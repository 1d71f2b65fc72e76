"""Views as a user runs them: `topics view`, against a real server."""

from __future__ import annotations

from tests.cli.conftest import Topics
from tests.contract.driver import Api

_FILE = """\
-- Revenue by tag.
-- on_delete: rebuild

-- schema
CREATE TABLE revenue (tag TEXT PRIMARY KEY, total INTEGER NOT NULL);

-- apply
INSERT INTO revenue SELECT :tag, :data ->> '$.amount' WHERE :tag IS NOT NULL
ON CONFLICT (tag) DO UPDATE SET total = total + excluded.total;

-- query all
SELECT tag, total FROM revenue ORDER BY tag;
-- query one
SELECT total FROM revenue WHERE tag = :tag
"""


def test_a_view_is_put_queried_listed_and_removed(topics: Topics, topic: str, api: Api) -> None:
    api.add(topic, {"amount": 5}, tag="a")
    api.add(topic, {"amount": 7}, {"amount": 1}, tag="b")
    path = topics.directory / "revenue.sql"
    path.write_text(_FILE)
    made = topics.good("view", "put", topic, "revenue", str(path)).value
    assert (made["created"], made["on_delete"]) == (True, "rebuild")
    assert sorted(made["queries"]) == ["all", "one"]
    asked = ("view", "query", topic, "revenue")
    assert topics.good(*asked, "all", "--after", "3").lines == [
        {"tag": "a", "total": 5},
        {"tag": "b", "total": 8},
    ]
    assert topics.good(*asked, "one", "-p", "tag=b").lines == [{"total": 8}]
    sql = "SELECT count(*) AS n FROM revenue WHERE total > :least"
    assert topics.good(*asked, sql, "-p", "least=6").lines == [{"n": 1}]
    shown = topics.good(*asked, "all", "--table").out.decode()
    assert shown.splitlines()[0].split() == ["tag", "total"]
    assert topics.good("view", "get", topic, "revenue").value["schema"] == made["schema"]
    table = topics.good("view", "ls", topic, "--table").out.decode()
    assert "revenue" in table
    assert "ready" in table
    topics.good("view", "rebuild", topic, "revenue")
    assert topics.good("view", "rm", topic, "revenue", "--yes").value["deleted"] is True
    for more in (("get", topic, "revenue"), ("rm", topic, "revenue", "--yes")):
        ran = topics("view", *more)
        assert (ran.code, ran.message.partition(":")[0]) == (1, "view_not_found")


def test_each_shortcut_is_an_option(topics: Topics, topic: str, api: Api) -> None:
    api.add(topic, {"k": 1, "n": 2}, {"k": 1, "n": 3}, tag="a")
    for words, rows in (
        (("--count-by-tag",), 1),
        (("--latest-by-tag",), 1),
        (("--latest-by-key", "/k"), 1),
        (("--timeseries", "1h", "--sum", "/n"), 1),
    ):
        topics.good("view", "put", topic, "v", *words)
        assert len(topics.good("view", "query", topic, "v", "all", "--after", "2").lines) >= rows


def test_wrong_words_and_files_are_told(topics: Topics, topic: str, api: Api) -> None:
    api.add(topic, 1)
    put = ("view", "put", topic, "v")
    path = topics.directory / "bad.sql"
    for text, words in (
        ("SELECT 1", "begin a section first"),
        ("-- schema\n-- schema\n", "comes twice"),
        ("-- schema\nCREATE TABLE t (a)", "section apply is missing"),
    ):
        path.write_text(text)
        ran = topics(*put, str(path))
        assert ran.code == 2
        assert words in ran.err
    path.write_bytes(b"\xff")
    assert topics(*put, str(path)).code == 1
    for wrong in (
        put,
        (*put, "--count-by-tag", "--latest-by-tag"),
        (*put, "--sum", "/n"),
        (*put, str(topics.directory / "nowhere.sql")),
        ("view", "query", topic, "v", "all", "-p", "x"),
    ):
        assert topics(*wrong).code == 2
    path.write_text("-- apply\nINSERT INTO nowhere VALUES (1)")
    ran = topics(*put, str(path))
    assert (ran.code, ran.message.partition(":")[0]) == (1, "query_failed")
    topics.good(*put, "--count-by-tag")
    ran = topics("view", "query", topic, "v", "SELECT * FROM sqlite_master")
    assert (ran.code, ran.message.partition(":")[0]) == (1, "query_failed")
