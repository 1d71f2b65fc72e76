"""`topics import`: files, exports and other servers; once, in order, with the original times."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import MakeServer, Topics
from tests.cli.records.test_load import head_of
from tests.contract.driver import Api, eventually


def records(path: Path, count: int, first: int = 1, ts: int = 1_000_000) -> Path:
    """A file of records as `topics read` prints them."""
    lines = [
        f'{{"$seq":{n},"$ts":{ts + n},"$tag":"t{n % 3}","$node":"n",'
        f'"data":{{"n": {n}}},"meta":{{"k" : {n}}}}}'
        for n in range(first, first + count)
    ]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def read(topics: Topics, topic: str) -> list[Any]:
    return topics.good("read", topic, "--tags").lines


def numbers(topics: Topics, topic: str) -> list[int]:
    return [record["data"]["n"] for record in topics.good("read", topic).lines]


def test_records_keep_everything_but_seq_and_time(
    topics: Topics, topic: str, tmp_path: Path
) -> None:
    path = records(tmp_path / "file", 2500)
    result = topics.good("import", path, topic).value
    assert (result["topic"], result["imported"], result["position"]) == (topic, 2500, 2500)
    assert (result["gaps"], result["bad_lines"], result["head_seq"]) == (0, 0, 2500)
    found = read(topics, topic)
    assert [record["$seq"] for record in found] == list(range(1, 2501))
    assert found[8]["$ts"] > 1_000_009
    assert (found[8]["$tag"], found[8]["$node"], found[8]["data"]) == ("t0", "n", {"n": 9})
    stamp = {"from": result["source"], "line": 9, "seq": 9, "ts": 1_000_009}
    assert found[8]["meta"] == {"$imported": stamp, "k": 9}


def test_a_second_run_imports_nothing_wherever_the_file_lies(
    topics: Topics, topic: str, tmp_path: Path
) -> None:
    path = records(tmp_path / "file", 30)
    topics.good("import", path, topic)
    (tmp_path / "moved.gz").write_bytes(gzip.compress(path.read_bytes()))
    for words in (["file"], ["moved.gz"], ["-"]):
        again = topics.good("import", *words, topic, stdin=path.read_bytes()).value
        assert (again["imported"], again["position"]) == (0, 30)
    assert numbers(topics, topic) == list(range(1, 31))


def test_a_file_that_has_grown_is_continued(topics: Topics, topic: str, tmp_path: Path) -> None:
    topics.good("import", records(tmp_path / "file", 10), topic)
    # Deleted records do not matter: the topic stores the position of the import in a producer.
    topics.good("delete", topic, "--before", "11", "--yes")
    assert topics.good("import", records(tmp_path / "file", 25), topic).value["imported"] == 15
    assert numbers(topics, topic) == list(range(11, 26))


def test_another_file_with_the_same_beginning_is_refused(
    topics: Topics, topic: str, tmp_path: Path
) -> None:
    path = records(tmp_path / "file", 10)
    topics.good("import", path, topic)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5] + lines[6:]))
    assert (
        "is another file. Give it a name of its own with --as"
        in topics("import", path, topic).message
    )
    path.write_bytes(b"".join([*lines[:5], *lines[6:], *lines[5:6]]))
    ran = topics("import", path, topic)
    assert ran.code == 1
    assert "the first 10 lines are not those that were imported" in ran.message
    assert topics.good("import", path, topic, "--as", "mine", "--append-anyway").value == {
        "topic": topic, "source": "mine", "imported": 10, "position": 10, "gaps": 0,
        "bad_lines": 0, "head_seq": 20,
    }  # fmt: skip


def test_a_topic_with_other_records_is_refused(
    topics: Topics, topic: str, tmp_path: Path, api: Api
) -> None:
    path = records(tmp_path / "file", 10)
    api.add(topic, "foreign")
    ran = topics("import", path, topic)
    assert ran.code == 1
    assert "--append-anyway" in ran.message
    assert head_of(api, topic) == 1
    assert topics.good("import", path, topic, "--append-anyway").value["imported"] == 10
    assert topics.good("import", path, topic).value["imported"] == 0


def test_a_file_with_a_bad_line_is_not_begun(
    topics: Topics, topic: str, tmp_path: Path, api: Api
) -> None:
    path = records(tmp_path / "file", 3000)
    path.write_bytes(path.read_bytes() + b'{"data":1,"x":2}\n{"data":7}\n')
    ran = topics("import", path, topic)
    assert ran.code == 1
    assert "file: line 3001: the member 'x' is not one of a record" in ran.message
    assert "Nothing was imported" in ran.message
    assert head_of(api, topic) == 0
    kept = topics.good("import", path, topic, "--skip-bad")
    assert (kept.value["imported"], kept.value["bad_lines"]) == (3001, 1)
    assert "line 3001" in kept.message
    again = topics.good("import", path, topic, "--skip-bad")
    assert (again.value["imported"], again.value["bad_lines"]) == (0, 0)


def test_a_bad_line_of_a_pipe_leaves_whole_batches(topics: Topics, topic: str) -> None:
    lines = b'{"data":1}\n{"data":2}\n{"data":3}\nfour\n{"data":5}\n'
    ran = topics("import", "-", topic, "--batch-records", "2", stdin=lines)
    assert ran.code == 1
    assert "line 4: not JSON" in ran.message
    assert "The 2 lines before line 3 are imported, no other" in ran.message
    fixed = lines.replace(b"four", b'{"data":4}')
    assert topics.good("import", "-", topic, stdin=fixed).value["imported"] == 3
    assert [record["data"] for record in topics.good("read", topic).lines] == [1, 2, 3, 4, 5]


def test_gaps_in_a_file_are_told_and_counted(topics: Topics, topic: str) -> None:
    gap = b'{"tombstone":{"gap_from":1,"gap_to":4,"reason":"cap","missed_estimate":4}}\n'
    ran = topics.good("import", "-", topic, stdin=gap + b'{"$seq":5,"$ts":1,"data":5}\n')
    assert (ran.value["imported"], ran.value["gaps"]) == (1, 1)
    assert ran.message == "gap: records 1 to 4 were gone there (cap)"


def test_a_file_of_gaps_does_not_flood_the_terminal_nor_control_it(
    topics: Topics, topic: str
) -> None:
    gap = b'{"tombstone":{"gap_from":1,"gap_to":4,"reason":"\\u001b[2J%s"}}\n' % (b"x" * 90)
    ran = topics.good("import", "-", topic, stdin=gap * 30 + b'{"data":5}\n')
    assert (ran.value["imported"], ran.value["gaps"]) == (1, 30)
    assert "\x1b" not in ran.err
    lines = ran.err.splitlines()
    assert lines[0] == f"gap: records 1 to 4 were gone there (?[2J{'x' * 36})"
    assert len(lines) == 21
    assert lines[-1] == "further gaps are counted"


def test_lines_of_any_form_with_a_field_of_the_time(topics: Topics, topic: str) -> None:
    lines = b'{"at":"2025-05-28T16:33:21Z","kind":"a"}\n'
    words = ("--whole-lines", "--tag-field", "kind", "--time-field", "at")
    topics.good("import", "-", topic, *words, stdin=lines)
    (found,) = read(topics, topic)
    assert found["data"] == {"at": "2025-05-28T16:33:21Z", "kind": "a"}
    assert found["$tag"] == "a"
    assert found["meta"]["$imported"]["ts"] == 1748450001000


def test_an_import_that_is_killed_goes_on(
    topics: Topics, topic: str, tmp_path: Path, api: Api
) -> None:
    path = records(tmp_path / "many", 20_000)
    for target in (2_000, 9_000):

        def passed(target: int = target) -> bool:
            return head_of(api, topic) > target

        verb = topics.spawn("import", path, topic, "--batch-records", "50")
        eventually(passed, f"the import passes line {target}", 60)
        verb.send_signal(signal.SIGKILL)
        verb.wait(20)
        assert verb.stdout is not None
        verb.stdout.close()
    last = topics.good("import", path, topic).value
    assert last["position"] == 20_000
    assert numbers(topics, topic) == list(range(1, 20_001))


def test_an_import_survives_a_crash_of_the_server(
    own: MakeServer, tmp_path: Path, topic: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = own({"TOPICS_PORT": str(port)})
    api = server.start()
    topics = Topics(api.url, tmp_path)
    path = records(tmp_path / "many", 20_000)
    verb = topics.spawn("import", path, topic, "--batch-records", "50")
    eventually(lambda: head_of(api, topic) > 2000, "the import is under way", 60)
    server.signal(signal.SIGKILL)
    server.start()
    assert verb.wait(60) == 0
    assert verb.stdout is not None
    assert json.loads(verb.stdout.read())["imported"] == 20_000
    verb.stdout.close()
    assert numbers(topics, topic) == list(range(1, 20_001))


def test_two_imports_of_one_file_at_a_time_store_it_once(
    topics: Topics, topic: str, tmp_path: Path
) -> None:
    path = records(tmp_path / "file", 4000)
    sizes = ("70", "90", "110")
    verbs = [topics.spawn("import", path, topic, "--batch-records", size) for size in sizes]
    codes = [verb.wait(60) for verb in verbs]
    for verb in verbs:
        assert verb.stdout is not None
        verb.stdout.close()
    assert set(codes) <= {0, 1}
    topics.good("import", path, topic)
    assert numbers(topics, topic) == list(range(1, 4001))


def test_a_topic_that_others_write_to_meanwhile_gets_every_line_once(
    topics: Topics, topic: str, tmp_path: Path, api: Api
) -> None:
    api.add(topic, {"n": 0})
    ended = threading.Event()

    def write() -> None:
        other = Api(api.url)
        while not ended.is_set():
            other.add(topic, {"n": 0})
        other.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        path = records(tmp_path / "file", 1000)
        words = ("--append-anyway", "--batch-records", "20")
        result = topics.good("import", path, topic, *words).value
    finally:
        ended.set()
        writer.join()
    assert result["imported"] == 1000
    assert [n for n in numbers(topics, topic) if n] == list(range(1, 1001))


def without_stamp(record: dict[str, Any]) -> dict[str, Any]:
    """The record as it was before its import."""
    stamp = record["meta"].pop("$imported")
    found: dict[str, Any] = {
        name: record[name] for name in ("data", "$tag", "$node") if name in record
    }
    return {**found, "meta": record["meta"], "$seq": stamp["seq"], "$ts": stamp["ts"]}


def test_an_export_is_imported_again(topics: Topics, topic: str, own: MakeServer) -> None:
    server = own({})
    api = server.start()
    source = Topics(api.url, topics.directory)
    for n in range(40):
        api.add("a.x", {"n": n}, tag=f"t{n % 3}", node="n", meta={"k": [n]})
    api.add("a.y", 1)
    api.add("b", 2)
    api.delete("a.x", before_seq=3)
    source.good("export", "--to", "out", "--format", "ndjson", "--rows-per-file", "7")
    results = topics.good("import", "out", "--prefix", "a.").lines
    assert [(each["topic"], each["imported"]) for each in results] == [("a.x", 38), ("a.y", 1)]
    assert [without_stamp(each) for each in read(topics, "a.x")] == [
        {"meta": {}, **each} for each in read(source, "a.x")
    ]
    # A later export adds files, and a second import their lines.
    api.add("a.x", {"n": 40}, meta={})
    source.good("export", "--to", "out", "--format", "ndjson")
    assert [each["imported"] for each in topics.good("import", "out", "a.x").lines] == [1]
    assert [each["imported"] for each in topics.good("import", "out", "a.x").lines] == [0]
    renamed = topics.good("import", "out", "b", "--into", topic).value
    assert (renamed["topic"], renamed["imported"]) == (topic, 1)
    assert "the export has no topic c" in topics("import", "out", "c").message


def test_a_topic_of_another_server_comes_with_its_configuration(
    topics: Topics, own: MakeServer
) -> None:
    server = own({})
    api = server.start()
    there = Topics(api.url, topics.directory)
    api.put("other.q", {"type": "queue", "lease_ms": 7000, "cap_records": 100_000})
    body = (
        b'{"records":[{"data":{ "n":1e400,"a":1,"a":2 },"tag":"t","node":"east","meta":{"k" : 1}}]}'
    )
    media = {"content-type": "application/json"}
    assert api.http.post("/v0/topics/other.q", content=body, headers=media).status_code == 200
    for n in range(2000, 3500, 300):
        api.append("other.log", [{"data": {"n": k}} for k in range(n, n + 300)])
    results = topics.good("import", api.url, "--prefix", "other.").lines
    assert [(each["topic"], each["imported"]) for each in results] == [
        ("other.log", 1500),
        ("other.q", 1),
    ]
    state = topics.good("info", "other.q").value
    assert state["type"] == "queue"
    assert state["config"]["lease_ms"] == 7000
    assert numbers(topics, "other.log") == list(range(2000, 3500))
    line = topics.good("read", "other.q", "--tags").out
    assert b'"data":{ "n":1e400,"a":1,"a":2 }' in line
    assert b',"k" : 1}' in line
    (there_record,) = read(there, "other.q")
    (record,) = read(topics, "other.q")
    assert record["meta"]["$imported"]["ts"] == there_record["$ts"]
    # A repeated import adds nothing; after new appends at the source it adds only those.
    assert topics.good("import", api.url, "other.log").value["imported"] == 0
    api.add("other.log", {"n": 3500})
    assert topics.good("import", api.url, "other.log").value["imported"] == 1
    # A topic that was dropped and made again is another source, of which the topic holds nothing.
    api.drop("other.log")
    api.add("other.log", {"n": 1})
    ran = topics("import", api.url, "other.log")
    assert ran.code == 1
    assert "--append-anyway" in ran.message
    server.stop()
    ran = topics("import", api.url, "other.log")
    assert ran.code == 2
    assert "cannot connect" in ran.message


def test_gaps_of_another_server_are_told(topics: Topics, topic: str, own: MakeServer) -> None:
    api = own({}).start()
    api.put("capped", {"cap_records": 3})
    for n in range(10):
        api.add("capped", {"n": n})
    ran = topics.good("import", api.url, "capped", "--into", topic, "--no-config")
    assert (ran.value["imported"], ran.value["gaps"]) == (3, 1)
    assert ran.message == "capped: gap: records 1 to 7 are gone at the source (cap)"
    assert numbers(topics, topic) == [7, 8, 9]
    assert topics.good("info", topic).value["config"]["cap_records"] == 0


def test_another_topic_under_the_same_address_is_recognised(
    topics: Topics, topic: str, own: MakeServer
) -> None:
    first = own({}).start()
    first.add("log", *({"n": n} for n in range(5)))
    words = ("log", "--into", topic, "--as", "site")
    topics.good("import", first.url, *words)
    second = own({}).start()
    second.add("log", {"n": 8})
    ran = topics("import", second.url, *words)
    assert "was imported up to seq 5 and has 1 seqs now" in ran.message
    assert ran.code == 1
    assert json.loads(topics.good("info", topic).out)["head_seq"] == 5


@pytest.mark.parametrize(
    "words",
    [
        ["file"],
        ["file", "a", "b"],
        ["file", "a", "--prefix", "a"],
        ["file", "a", "--as", "é"],
        ["file", "a", "--data-field", "x", "--tag-field", "x"],
        ["http://127.0.0.1:1", "a", "--whole-lines"],
        ["http://127.0.0.1:1", "a", "b", "--into", "c"],
        ["http://user@127.0.0.1:1", "a"],
        [".", "a", "--time-field", "x"],
        ["file", "a", "--batch-records", "1001"],
    ],
)
def test_options_that_do_not_fit_are_wrong_usage(alone: Topics, words: list[str]) -> None:
    assert alone("import", *words).code == 2
