"""The verbs for topics and records: output, exit codes, and payload bytes that stay unchanged."""

from __future__ import annotations

import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.cli.conftest import Ran, Topics
from tests.contract.driver import Api, eventually, good

ODD = '{"b":1e400, "a": [1 ,2],\t"a":3, "\\u0061":"\\u00e9é", "n":-0.0 }'


def test_a_record_comes_back_byte_for_byte(topics: Topics, topic: str) -> None:
    made = topics.good("append", topic, ODD, "--tag", "a b", "--node", "n", "--meta", '{"k" : 1}')
    assert made.value["seqs"] == [1]
    line = topics.good("read", topic, "--tags").out
    assert b'"data":' + ODD.encode() in line
    assert b'"meta":{"k" : 1}' in line
    assert line.count(b"\n") == 1
    (record,) = topics.good("read", topic, "--tags").lines
    assert (record["$seq"], record["$tag"], record["$node"]) == (1, "a b", "n")


def test_data_comes_from_a_file_or_standard_input(
    topics: Topics, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "data.json").write_text("[1,\n 2]\n")
    topics.good("append", topic, "--file", "data.json")
    topics.good("append", topic, "--file", "-", stdin=b' "two" \n')
    topics.good("append", topic, stdin=b"3")
    ran = topics.good("read", topic)
    # A line of output can keep every byte except line breaks between tokens.
    assert ran.out.splitlines()[0].endswith(b'"data":[1,  2]}')
    assert [record["data"] for record in ran.lines] == [[1, 2], "two", 3]


def test_append_with_a_dash_takes_a_record_a_line(topics: Topics, topic: str) -> None:
    words = ("append", topic, "-", "--tag", "t", "--meta", '{"k": 1}')
    done = topics.good(*words, stdin=b'{"n": 1e400}\n\n "two"\n3').value
    assert done == {"topic": topic, "lines": 3, "first_seq": 1, "last_seq": 3}
    ran = topics.good("read", topic, "--tags")
    assert b'"data":{"n": 1e400}' in ran.out
    assert [(r["$tag"], r["meta"]) for r in ran.lines] == [("t", {"k": 1})] * 3
    assert topics.good(*words, stdin=b"1\n").value["first_seq"] == 4


def has(api: Api, topic: str, count: int) -> bool:
    return bool(api.get_state(topic)["count"] == count)


def test_append_with_a_dash_appends_each_line_at_once(topics: Topics, topic: str, api: Api) -> None:
    verb = topics.spawn("append", topic, "-", stdin=subprocess.PIPE)
    assert verb.stdin is not None
    for number in (1, 2):
        verb.stdin.write(b"%d\n" % number)
        verb.stdin.flush()
        eventually(lambda: api.state(topic).status_code == 200, "the topic is made", 30)
        eventually(partial(has, api, topic, number), "it is there", 30)
    verb.stdin.close()
    assert verb.wait(30) == 0
    assert verb.stdout is not None
    verb.stdout.close()


def test_append_with_a_dash_says_which_line_is_wrong(topics: Topics, topic: str) -> None:
    ran = topics("append", topic, "-", stdin=b"1\n2\nthree\n4\n")
    assert (ran.code, ran.out) == (1, b"")
    assert ran.message.startswith("line 3: not JSON")
    assert ran.message.endswith("2 lines were appended")
    assert len(topics.good("read", topic).lines) == 2
    ran = topics("append", f"{topic}.absent", "-", "--no-create", stdin=b"1\n")
    assert (ran.code, ran.message.partition(":")[0]) == (1, "topic_not_found")
    assert ran.message.endswith("nothing was appended")
    for words in (["--key", "k"], ["--producer", "p"], ["--file", "f"]):
        assert topics("append", topic, "-", *words, stdin=b"1\n").code == 2


@pytest.mark.parametrize("data", ["hello", "{a:1}", "1 2", "", '{"a":1'])
def test_data_that_is_not_json_is_wrong_usage(topics: Topics, topic: str, data: str) -> None:
    ran = topics("append", topic, data)
    assert ran.code == 2
    assert "not JSON" in ran.err
    assert ran.out == b""


def test_a_string_without_quotes_is_told_how_to_quote(alone: Topics) -> None:
    assert """topics append jobs '"hello"'""" in alone("append", "jobs", "hello").err


def test_a_key_appends_once(topics: Topics, topic: str) -> None:
    first = topics.good("append", topic, "1", "--key", "k").value
    again = topics.good("append", topic, "1", "--key", "k").value
    assert (first["deduped"], again["deduped"]) == (False, True)
    assert again["seqs"] == first["seqs"]


def test_put_sets_what_is_given_and_the_rest_to_defaults(topics: Topics, topic: str) -> None:
    made = topics.good("put", topic, "--durability", "fsync", "--cap-records", "5").value
    assert made["created"] is True
    assert (made["config"]["durability"], made["config"]["cap_records"]) == ("fsync", 5)
    again = topics.good("put", topic, "--no-dedupe-node").value
    assert (again["config"]["durability"], again["config"]["dedupe_node"]) == ("disk", False)


def test_set_changes_what_is_named(topics: Topics, topic: str) -> None:
    topics.good("put", topic, "--durability", "fsync", "--cap-records", "5")
    ran = topics.good("set", topic, "--ttl-ms", "9", "--default", "cap-records")
    assert ran.value["changed"] == {"ttl_ms": [0, 9], "cap_records": [5, 0]}
    assert ran.value["config"]["durability"] == "fsync"
    assert "nothing changed" in topics.good("set", topic, "--ttl-ms", "9").message
    assert topics("set", topic).code == 2
    assert topics("set", f"{topic}.absent", "--ttl-ms", "9").code == 1


def test_a_value_beyond_its_limit_is_told(topics: Topics, topic: str) -> None:
    ran = topics.good("put", topic, "--type", "queue", "--lease", "1ms", "--priority", "5000")
    assert sorted(ran.err.splitlines()) == [
        "lease_ms is 100, the limit: 1 is beyond it",
        "priority is 1000, the limit: 5000 is beyond it",
    ]
    assert topics.good("set", topic, "--lease", "5s").err == ""


def test_options_of_queues_on_a_log_give_a_warning(topics: Topics, topic: str) -> None:
    said = topics.good("put", topic, "--max-deliveries", "3").message
    assert said == (
        f"{topic} is a log, on which max_deliveries has no effect; "
        "a queue is made with --type queue"
    )
    ran = topics.good("set", topic, "--default", "typ")
    assert ran.err.splitlines() == [
        "the server does not know 'typ' and ignored it; did you mean type?",
        "nothing changed",
    ]


def test_read_goes_from_a_position_to_a_limit(topics: Topics, topic: str, api: Api) -> None:
    api.add(topic, *range(2500))
    seqs = [record["$seq"] for record in topics.good("read", topic).lines]
    assert seqs == list(range(1, 2501))
    some = topics.good("read", topic, "--from", "1100", "--limit", "1200").lines
    assert [record["data"] for record in some] == list(range(1100, 2300))


def test_read_last_skips_deleted_records(topics: Topics, topic: str, api: Api) -> None:
    """The last three records are 1, 2 and 100; all records between them are deleted."""
    for n in range(1, 101):
        api.add(topic, n, tag="keep" if n in (1, 2, 100) else "drop", node="n" if n == 2 else "m")
    assert api.delete(topic, match="drop").json()["deleted"] == 97
    found = topics.good("read", topic, "--last", "3").lines
    assert [record["data"] for record in found] == [1, 2, 100]
    assert [r["data"] for r in topics.good("read", topic, "--last", "2").lines] == [2, 100]
    assert [r["data"] for r in topics.good("read", topic, "--last", "9").lines] == [1, 2, 100]
    some = topics.good("read", topic, "--last", "2", "--node", "n").lines
    assert [record["data"] for record in some] == [1, 100]
    assert topics("read", topic, "--last", "1", "--from", "0").code == 2


def test_read_last_follows(topics: Topics, topic: str, api: Api) -> None:
    api.add(topic, 1, 2, 3)
    reader = topics.spawn("read", topic, "--last", "2", "--follow", "--limit", "3")
    assert reader.stdout is not None
    assert b'"data":2' in reader.stdout.readline()
    assert b'"data":3' in reader.stdout.readline()
    api.add(topic, 4)
    assert b'"data":4' in reader.stdout.readline()
    assert reader.wait(20) == 0
    reader.stdout.close()


def test_read_last_of_an_empty_topic_is_nothing(topics: Topics, topic: str, api: Api) -> None:
    api.put(topic)
    assert topics.good("read", topic, "--last", "5").out == b""


def test_read_leaves_out_nodes(topics: Topics, topic: str, api: Api) -> None:
    for node in "abc":
        api.add(topic, node, node=node)
    found = topics.good("read", topic, "--node", "a", "--node", "c").lines
    assert [record["data"] for record in found] == ["b"]


def test_a_gap_is_a_line_and_a_word(topics: Topics, topic: str, api: Api) -> None:
    api.put(topic, {"cap_records": 2})
    api.add(topic, 1, 2, 3, 4, 5)
    ran = topics.good("read", topic)
    gap, *records = ran.lines
    assert (gap["tombstone"]["gap_from"], gap["tombstone"]["reason"]) == (1, "cap")
    assert [record["$seq"] for record in records] == list(range(gap["tombstone"]["gap_to"] + 1, 6))
    assert ran.message.startswith(f"gap: records 1 to {gap['tombstone']['gap_to']} are gone (cap)")


def test_follow_prints_records_as_they_come(topics: Topics, topic: str, api: Api) -> None:
    api.add(topic, "there")
    reader = topics.spawn("read", topic, "--follow", "--limit", "3")
    assert reader.stdout is not None
    assert b'"there"' in reader.stdout.readline()
    api.add(topic, "second")
    assert b'"second"' in reader.stdout.readline()
    api.add(topic, "third")
    assert b'"third"' in reader.stdout.readline()
    assert reader.wait(20) == 0
    reader.stdout.close()


def test_ls_and_info_tell_what_the_server_tells(topics: Topics, topic: str, api: Api) -> None:
    api.add(topic, 1, 2)
    (listed,) = topics.good("ls", "--prefix", topic).lines
    assert (listed["topic"], listed["count"]) == (topic, 2)
    assert topics.good("info", topic).value["head_seq"] == 2


def test_json_of_lists_is_what_the_server_sent(topics: Topics, topic: str, api: Api) -> None:
    api.add(topic, 1)
    good(api.http.put(f"/v0/routers/{topic}", json={"source": topic, "dest": f"{topic}.x"}))
    page = api.http.get(f"/v0/topics?prefix={topic}").content
    row = page.partition(b'{"topics":[')[2].partition(b"]")[0]
    assert b"".join(topics.good("ls", "--prefix", topic).out.splitlines()) in (
        row,
        row.replace(b"},{", b"}{"),
    )
    state = topics.good("info", topic).out
    fresh = api.http.get(f"/v0/topics/{topic}?touch=false").content
    assert without_timings(state.rstrip()) == without_timings(fresh)
    page = api.http.get(f"/v0/routers?prefix={topic}").content
    row = page.partition(b'{"routers":[')[2].partition(b"]")[0]
    assert topics.good("router", "ls", "--prefix", topic).out.rstrip() == row


def without_timings(answer: bytes) -> bytes:
    return answer.partition(b',"performance"')[0]


def table(ran: Ran) -> list[list[str]]:
    """The cells of a table; columns are two spaces apart."""
    return [re.split(r"  +", line.strip()) for line in ran.out.decode().splitlines()]


def test_tables_of_topics_tell_type_size_age_and_jobs(topics: Topics, topic: str, api: Api) -> None:
    api.add(f"{topic}.log", "x" * 2000)
    api.put(f"{topic}.queue", {"type": "queue", "lease_ms": 45_000, "max_deliveries": 3})
    api.add(f"{topic}.queue", 1, 2)
    topics.good("stream", "create", f"{topic}.stream")
    topics.env["COLUMNS"] = "200"
    head, log, queue, stream = table(topics.good("ls", "--table", "--prefix", topic))
    assert head == ["topic", "type", "records", "size", "written", "durability", "about"]
    assert [log[0], *log[1:4], log[5]] == [f"{topic}.log", "log", "1", "2 KiB", "disk"]
    assert log[4] == "now" or log[4].endswith(" s ago")
    assert [*queue[1:3], queue[6]] == ["queue", "2", "2 ready"]
    assert [stream[1], stream[4], stream[6]] == ["stream", "never", f"{topic}.stream"]
    facts = dict(row for row in table(topics.good("info", f"{topic}.queue", "--table")) if row[1:])
    assert facts["records"] == "2 (seqs 1 to 2)"
    assert (facts["jobs"], facts["lease"], facts["max-deliveries"]) == ("2 ready", "45 s", "3")
    assert facts["ttl"] == "keeps for ever"
    assert "lease" not in dict(
        row for row in table(topics.good("info", f"{topic}.log", "--table")) if row[1:]
    )


def test_a_table_of_routers_tells_lag_and_state(topics: Topics, topic: str, api: Api) -> None:
    good(api.http.put(f"/v0/routers/{topic}", json={"source": topic, "dest": f"{topic}.x"}))
    topics.env["COLUMNS"] = "200"
    head, row = table(topics.good("router", "ls", "--prefix", topic, "--table"))
    assert head[-3:] == ["forwarded", "lag", "state"]
    assert row[-3:] == ["0", "0", "running"]


def test_tables_show_data_as_data(topics: Topics, topic: str, api: Api) -> None:
    api.add(topic, "[red]not markup[/red]")
    assert "[red]not markup" in topics.good("read", topic, "--table").out.decode()


def test_delete_by_tag_prefix_and_position(topics: Topics, topic: str, api: Api) -> None:
    for tag in ("a", "a1", "b", "b"):
        api.add(topic, tag, tag=tag)
    assert topics.good("delete", topic, "--tag", "a", "--yes").value["deleted"] == 1
    assert topics.good("delete", topic, "--tag-prefix", "a", "--yes").value["deleted"] == 1
    assert (
        topics.good("delete", topic, "--tag", "b", "--before", "4", "--yes").value["deleted"] == 1
    )
    assert topics.good("delete", topic, "--before", "9", "--yes").value["count"] == 0


@pytest.mark.parametrize(
    "words", [[], ["--tag", "a", "--tag-prefix", "b"], ["--tag-prefix", "a*"], ["--before", "-1"]]
)
def test_delete_wants_to_know_what(alone: Topics, words: list[str]) -> None:
    assert alone("delete", "jobs", *words).code == 2


def test_rm_removes_and_says_when_there_was_nothing(topics: Topics, topic: str, api: Api) -> None:
    api.add(topic, 1)
    assert topics("rm", topic, "--if-empty", "--yes").message.startswith("topic_not_empty: ")
    assert topics.good("rm", topic, "--yes").value["deleted"] is True
    again = topics("rm", topic, "--yes")
    assert (again.code, again.out) == (1, b"")
    assert again.message.startswith("topic_not_found: ")


@pytest.mark.parametrize(
    "words", [["read", "t-none"], ["info", "t-none"], ["append", "t-none", "1", "--no-create"]]
)
def test_an_unknown_name_is_exit_code_1(topics: Topics, words: list[str]) -> None:
    ran = topics(*words)
    assert (ran.code, ran.out) == (1, b"")
    assert ran.message.startswith("topic_not_found: ")


DELETING = [
    ["rm", "NAME"],
    ["delete", "NAME", "--before", "9"],
    ["stream", "rm", "NAME"],
    ["router", "rm", "NAME"],
    ["queue", "purge", "NAME"],
    ["queue", "purge", "NAME", "--all"],
]


@pytest.mark.parametrize("words", DELETING, ids=" ".join)
def test_without_a_terminal_nothing_is_deleted_unless_yes_is_said(
    topics: Topics, topic: str, api: Api, words: list[str]
) -> None:
    api.put(topic, {"type": "queue"})
    api.add(topic, 1, 2)
    ran = topics(*[topic if word == "NAME" else word for word in words], stdin=b"y\n")
    assert (ran.code, ran.out) == (2, b"")
    assert "--yes is missing, and there is no terminal for the question" in ran.err
    assert api.get_state(topic)["count"] == 2


def test_a_name_never_leaves_its_path_segment(topics: Topics) -> None:
    ran = topics("info", "../health")
    assert ran.code == 1
    assert ran.message.startswith("invalid_request: ")


@pytest.mark.parametrize("words", [["ls"], ["append", "t", "1"], ["read", "t"]])
def test_no_server_is_exit_code_2(alone: Topics, words: list[str]) -> None:
    ran = alone(*words)
    assert ran.code == 2
    assert ran.message.startswith("cannot connect to http://127.0.0.1:1")


@pytest.mark.parametrize("url", ["localhost:4000", "ftp://x", "http://", "http://x:99999"])
def test_a_bad_url_is_wrong_usage(alone: Topics, url: str) -> None:
    ran = alone("ls", "--url", url)
    assert ran.code == 2
    assert "not the URL of a server" in ran.err


@pytest.mark.parametrize(("answer", "stays"), [("n", True), ("y", False)])
def test_on_a_terminal_rm_asks_first(
    topics: Topics, topic: str, api: Api, answer: str, stays: bool
) -> None:
    api.add(topic, 1)
    person, terminal = os.openpty()
    try:
        verb = topics.spawn("rm", topic, stdin=terminal, stdout=terminal, stderr=subprocess.STDOUT)
        os.write(person, f"{answer}\n".encode())
        assert verb.wait(20) == (1 if stays else 0)
    finally:
        os.close(terminal)
        os.close(person)
    assert (api.state(topic).status_code == 200) is stays
