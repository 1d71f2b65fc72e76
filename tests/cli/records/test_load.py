"""`topics load`: exact bytes, order, resuming at any later time, and refusals."""

from __future__ import annotations

import gzip
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import WEBHOOKS, MakeServer, Topics
from tests.contract.driver import Api, eventually

FIELDS = ("--data-field", "payload", "--tag-field", "event")


def payloads() -> list[bytes]:
    """The payloads of the webhook file, byte for byte."""
    lines = gzip.decompress(WEBHOOKS.read_bytes()).splitlines()
    return [line[line.index(b'"payload":') + 10 : -1] for line in lines]


def data_of(topics: Topics, topic: str) -> list[bytes]:
    """The data of all records, byte for byte."""
    lines = topics.good("read", topic).out.splitlines()
    return [line[line.index(b'"data":') + 7 : -1] for line in lines]


def numbered(path: Path, count: int, first: int = 1) -> Path:
    """A file of `count` different lines."""
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(first, first + count)))
    return path


def head_of(api: Api, topic: str) -> int:
    """The topic's head; 0 while it does not exist."""
    state = api.state(topic)
    return int(state.json()["head_seq"]) if state.status_code == 200 else 0


def test_the_webhooks_are_loaded_verbatim_and_once(topics: Topics, topic: str) -> None:
    result = topics.good("load", topic, WEBHOOKS, *FIELDS).value
    assert (result["lines"], result["loaded"], result["stored"]) == (329, 329, 0)
    assert data_of(topics, topic) == payloads()
    again = topics.good("load", topic, WEBHOOKS, *FIELDS)
    assert (again.value["loaded"], again.value["stored"]) == (0, 329)
    tags = [record["$tag"] for record in topics.good("read", topic, "--tags").lines]
    assert tags.count("push") == 7


def test_other_parts_than_before_are_another_file(topics: Topics, topic: str) -> None:
    topics.good("load", topic, WEBHOOKS, *FIELDS)
    ran = topics("load", topic, WEBHOOKS, "--data-field", "payload")
    assert ran.code == 1
    assert "record 1 of the topic is not line 1" in ran.message


@pytest.mark.parametrize("first_batch", [1, 7, 100, 329])
def test_a_load_goes_on_where_it_stopped(
    topics: Topics, topic: str, tmp_path: Path, first_batch: int
) -> None:
    lines = numbered(tmp_path / "all", 1000).read_bytes().splitlines(keepends=True)
    topics.good(
        "load", topic, "-", "--batch-records", str(first_batch), stdin=b"".join(lines[:329])
    )
    result = topics.good("load", topic, "all", "--batch-records", "50").value
    assert (result["stored"], result["loaded"]) == (329, 671)
    assert data_of(topics, topic) == [line.rstrip() for line in lines]


def test_lines_that_repeat_are_counted_not_recognised(
    topics: Topics, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "same").write_text("1\n" * 500)
    topics.good("load", topic, "-", stdin=b"1\n" * 123)
    assert topics.good("load", topic, "same").value["loaded"] == 377
    assert topics.good("info", topic).value["head_seq"] == 500


def test_deleted_records_do_not_come_again(
    topics: Topics, topic: str, tmp_path: Path, api: Api
) -> None:
    numbered(tmp_path / "half", 100)
    topics.good("load", topic, "half")
    api.delete(topic, before_seq=60)
    numbered(tmp_path / "all", 200)
    assert topics.good("load", topic, "all").value["loaded"] == 100
    assert api.get_state(topic)["count"] == 141


def test_a_topic_that_holds_something_else_is_refused(
    topics: Topics, topic: str, tmp_path: Path, api: Api
) -> None:
    numbered(tmp_path / "file", 300)
    api.add(topic, "foreign")
    ran = topics("load", topic, "file")
    assert (ran.code, ran.out) == (1, b"")
    assert "--append-anyway" in ran.message
    assert api.get_state(topic)["head_seq"] == 1
    assert topics.good("load", topic, "file", "--append-anyway").value["loaded"] == 300
    again = topics.good("load", topic, "file", "--append-anyway").value
    assert (again["loaded"], again["stored"]) == (0, 300)
    assert topics.good("load", topic, "file", "--from-line", "299").value["loaded"] == 2


def test_a_longer_topic_is_refused(topics: Topics, topic: str, tmp_path: Path) -> None:
    topics.good("load", topic, "-", stdin=numbered(tmp_path / "x", 10).read_bytes())
    ran = topics("load", topic, "-", stdin=numbered(tmp_path / "x", 5).read_bytes())
    assert ran.code == 1
    assert "10 records, the file has 5 lines" in ran.message


def test_whole_records_keep_their_parts(topics: Topics, topic: str) -> None:
    lines = (
        b'{"data":[1 ,2],"tag":"t","node":"n","meta":{"k": 1}}\n'
        b'\n{"data":null}\r\n{"$seq":9,"data":"x"}'
    )
    assert topics.good("load", topic, "-", "--records", stdin=lines).value["loaded"] == 3
    first, second, third = topics.good("read", topic, "--tags").out.splitlines()
    assert b'"data":[1 ,2]' in first
    assert b'"meta":{"k": 1}' in first
    assert b'"$tag":"t"' in first
    assert second.endswith(b'"data":null}')
    assert third.endswith(b'"data":"x"}')


def test_a_node_for_all_and_one_from_a_field(topics: Topics, topic: str) -> None:
    lines = b'{"who":"own"}\n{}\n'
    topics.good("load", topic, "-", "--node", "all", "--node-field", "who", stdin=lines)
    assert [r["$node"] for r in topics.good("read", topic).lines] == ["own", "all"]
    again = topics.good("load", topic, "-", "--node", "all", "--node-field", "who", stdin=lines)
    assert again.value["stored"] == 2


def test_a_wrong_first_line_appends_nothing_and_says_so(topics: Topics, topic: str) -> None:
    ran = topics("load", topic, "-", stdin=b"{four\n5\n")
    assert ran.code == 1
    assert "line 1: not JSON" in ran.message
    assert ran.message.endswith("(nothing was appended)")


def test_a_bad_line_is_named_and_what_was_before_it_stays(topics: Topics, topic: str) -> None:
    lines = b"1\n2\n3\nfour\n5\n"
    ran = topics("load", topic, "-", "--batch-records", "2", stdin=lines)
    assert ran.code == 1
    assert "line 4: not JSON" in ran.message
    assert "2 records were appended; a second run continues after line 2" in ran.message
    fixed = topics.good("load", topic, "-", "--batch-records", "2", stdin=b"1\n2\n3\n4\n5\n")
    assert (fixed.value["stored"], fixed.value["loaded"]) == (2, 3)


def test_what_the_server_refuses_is_told_with_its_lines(topics: Topics, topic: str) -> None:
    lines = b'{"t":"ok"}\n{"t":"' + b"x" * 300 + b'"}\n'
    ran = topics("load", topic, "-", "--tag-field", "t", stdin=lines)
    assert ran.code == 1
    assert ran.message.startswith("invalid_request: ")
    assert "lines 1 to 2" in ran.message


@pytest.mark.parametrize(
    "words",
    [
        ["--records", "--tag-field", "x"],
        ["--data-field", "x", "--tag-field", "x"],
        ["--append-anyway", "--from-line", "2"],
        ["--from-line", "0"],
        ["--batch-records", "0"],
    ],
)
def test_options_that_do_not_fit_are_wrong_usage(alone: Topics, words: list[str]) -> None:
    assert alone("load", "jobs", "-", *words).code == 2


def test_a_load_that_was_killed_goes_on_without_loss_or_double(
    topics: Topics, topic: str, tmp_path: Path, api: Api
) -> None:
    path = numbered(tmp_path / "many", 60_000)
    for target in (5_000, 20_000, 40_000):

        def passed(target: int = target) -> bool:
            return head_of(api, topic) > target

        verb = topics.spawn("load", topic, path, "--batch-records", "100")
        eventually(passed, f"the load passes line {target}")
        verb.send_signal(signal.SIGKILL)
        verb.wait(20)
        assert verb.stdout is not None
        verb.stdout.close()
    result = topics.good("load", topic, path).value
    assert result["stored"] + result["loaded"] == 60_000
    assert data_of(topics, topic) == path.read_bytes().splitlines()


def test_a_load_survives_a_crash_of_the_server(own: MakeServer, tmp_path: Path, topic: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = own({"TOPICS_PORT": str(port)})
    api = server.start()
    topics = Topics(api.url, tmp_path)
    path = numbered(tmp_path / "many", 40_000)
    verb = topics.spawn("load", topic, path, "--batch-records", "50")
    eventually(lambda: head_of(api, topic) > 2000, "the load is under way")
    server.signal(signal.SIGKILL)
    time.sleep(0.5)
    server.start()
    assert verb.wait(60) == 0
    assert verb.stdout is not None
    verb.stdout.close()
    assert data_of(topics, topic) == path.read_bytes().splitlines()


def test_lines_of_a_slow_pipe_are_sent_before_the_pipe_ends(
    topics: Topics, topic: str, api: Api
) -> None:
    load = topics.spawn("load", topic, "-", stdin=subprocess.PIPE)
    assert load.stdin is not None
    for number in (1, 2):
        load.stdin.write(b'{"n": %d}\n' % number)
        load.stdin.flush()
        eventually(lambda: head_of(api, topic) == number, "the line is stored", 30)  # noqa: B023
    load.communicate(timeout=30)
    assert load.returncode == 0


@pytest.mark.parametrize("begun", [False, True])
def test_an_idle_pipe_does_not_keep_ctrl_c_from_ending_a_load(
    topics: Topics, topic: str, api: Api, begun: bool
) -> None:
    load = topics.spawn("load", topic, "-", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert load.stdin is not None
    if begun:
        load.stdin.write(b"1\n")
        load.stdin.flush()
        eventually(lambda: head_of(api, topic) == 1, "the line is stored", 30)
    else:
        tasks = Path(f"/proc/{load.pid}/task")
        eventually(lambda: len(list(tasks.iterdir())) > 1, "the reader's thread runs", 30)
    load.send_signal(signal.SIGINT)
    _, told = load.communicate(timeout=30)
    assert load.returncode == 1
    assert b"Traceback" not in told


def test_a_refusal_is_told_while_the_pipe_is_open(topics: Topics, topic: str) -> None:
    load = topics.spawn("load", topic, "-", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert load.stdin is not None
    load.stdin.write(b"1\n2\nno JSON\n")
    load.stdin.flush()
    assert load.wait(30) == 1
    assert b"line 3" in load.communicate()[1]
