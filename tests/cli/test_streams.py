"""`tail`, `watch` and `pub` as processes against real servers that are killed, emptied and
stopped.
"""

from __future__ import annotations

import array
import base64
import fcntl
import gzip
import json
import random
import signal
import socket
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.cli.conftest import WEBHOOKS, MakeServer, Topics
from tests.contract.driver import Api, Server, eventually, good

WITHIN_S = 30.0


class Verb:
    """A running verb: its output so far, and its exit code."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.process = process
        self.out: list[bytes] = []
        self._errors = errors
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self.out.extend(iter(stream.readline, b""))

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._errors.read_text()

    def seqs(self) -> list[int]:
        """The seqs of the printed records, without tombstones."""
        lines = map(json.loads, list(self.out))
        return [line["$seq"] for line in lines if "$seq" in line]

    def wait_for(self, count: int) -> None:
        """Wait until `count` lines were printed."""
        eventually(lambda: len(self.out) >= count, f"{count} lines; {self.err}", WITHIN_S)

    def end(self) -> int:
        """Wait until the verb ends by itself; return its exit code."""
        code = self.process.wait(WITHIN_S)
        self._thread.join()
        return code

    def interrupt(self) -> int:
        """Send Ctrl-C and return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.end()


Spawn = Callable[..., Verb]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """Start a verb on these topics; a process that still runs at the end is killed."""
    verbs: list[Verb] = []

    def start(topics: Topics, *words: str, **options: Any) -> Verb:
        errors = tmp_path / f"errors-{len(verbs)}"
        with errors.open("wb") as file:
            verb = Verb(topics.spawn(*words, stderr=file, **options), errors)
        verbs.append(verb)
        return verb

    yield start
    for verb in verbs:
        if verb.process.poll() is None:
            verb.process.kill()
            verb.end()


def on_a_port(own: MakeServer, **env: str) -> Server:
    """A running server that restarts on its port, which no other process gets meanwhile."""
    for _ in range(100):
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                break
    server = own({"TOPICS_PORT": str(port), **env})
    server.start()
    return server


# -- tail ----------------------------------------------------------------------------------------


def test_tail_prints_what_is_new_and_stops_after_n(
    topics: Topics, topic: str, api: Api, spawn: Spawn
) -> None:
    api.add(topic, "before")
    verb = spawn(topics, "tail", topic, "--limit", "3")
    eventually(lambda: _sees(api, topic, verb), "the tail is live", WITHIN_S)
    seen = len(verb.out)
    api.add(topic, "a", "b", "c", "d")
    assert verb.end() == 0
    assert len(verb.out) == 3
    assert b'"before"' not in b"".join(verb.out)
    assert verb.seqs() == sorted(set(verb.seqs()))
    assert seen >= 1


def _sees(api: Api, topic: str, verb: Verb) -> bool:
    """Append a record; return whether the verb has printed one."""
    if not verb.out:
        api.add(topic, "ping")
    return bool(verb.out)


def test_records_are_printed_as_read_prints_them(topics: Topics, topic: str) -> None:
    odd = '{"b":1e400, "a": [1 ,2],\t"a":3, "\\u0061":"\\u00e9é\u2028", "n":-0.0 }'
    topics.good("append", topic, odd, "--tag", "t", "--meta", '{"k" : 1}')
    topics.good("append", topic, "[1,\n 2]")
    tailed = topics.good("tail", topic, "--from-start", "--tags", "--limit", "2")
    assert tailed.out == topics.good("read", topic, "--tags").out
    bare = topics.good("tail", topic, "--from-start", "--no-meta", "--limit", "1")
    assert b"$tag" not in bare.out
    assert b'"meta"' not in bare.out
    table = topics.good("tail", topic, "--from", "1", "--limit", "1", "--table").out.decode()
    assert table.split() == ["2", *table.split()[1:3], "[1,", "2]"]


def test_several_topics_are_told_apart(topics: Topics, topic: str, api: Api) -> None:
    names = [f"{topic}-{letter}" for letter in "abc"]
    for name in names:
        api.add(name, *range(300), node="n")
        api.add(name, "mine", node="me")
    ran = topics.good("tail", *names, "--from-start", "--node", "me", "--limit", "900")
    found: dict[str, list[int]] = {}
    for line in ran.lines:
        assert next(iter(line)) == "topic"
        found.setdefault(line["topic"], []).append(line["$seq"])
    assert found == {name: list(range(1, 301)) for name in names}


def test_strong_prints_what_is_synced(topics: Topics, topic: str, api: Api) -> None:
    good(api.put(topic, {"durability": "fsync"}))
    api.add(topic, 1, 2, 3)
    assert [
        r["data"]
        for r in topics.good("tail", topic, "--from-start", "--strong", "--limit", "3").lines
    ]
    assert topics.good("tail", topic, "--from", "2", "--strong", "--limit", "1").value["data"] == 3


def test_a_gap_is_a_line_and_a_word(topics: Topics, topic: str, api: Api) -> None:
    good(api.put(topic, {"cap_records": 5}))
    api.add(topic, *range(20))
    earliest = api.get_state(topic)["earliest_seq"]
    ran = topics.good("tail", topic, "--from-start", "--limit", str(21 - earliest))
    gap, *records = ran.lines
    assert gap["tombstone"]["gap_to"] == earliest - 1
    assert [record["$seq"] for record in records] == list(range(earliest, 21))
    reason = gap["tombstone"]["reason"]
    assert ran.message == f"gap: seqs 1-{earliest - 1} of {topic} are gone ({reason})"


def test_a_tail_outlives_kill_9_and_restart(own: MakeServer, tmp_path: Path, spawn: Spawn) -> None:
    server = on_a_port(own)
    topics = Topics(server.api.url, tmp_path)
    server.api.add("a", *range(50))
    server.api.add("b", *range(50))
    verb = spawn(topics, "tail", "a", "b", "--from-start")
    verb.wait_for(100)
    for count, again in ((160, server.crash), (220, server.restart)):
        again()
        server.api.add("a", *range(30))
        server.api.add("b", *range(30))
        verb.wait_for(count)
    for name in "ab":
        lines = [json.loads(line) for line in verb.out]
        seqs = [line["$seq"] for line in lines if line["topic"] == name]
        assert seqs == list(range(1, 111))
    assert verb.interrupt() == 0
    assert len(verb.out) == 220
    assert verb.err.count("reconnecting") == 2


# Above 64 topics ids are checkpoint tokens, which the new session also gets.
@pytest.mark.parametrize("others", [0, 70])
def test_a_tail_outlives_its_session(
    own: MakeServer, tmp_path: Path, spawn: Spawn, others: int
) -> None:
    server = on_a_port(own)
    topics = Topics(server.api.url, tmp_path)
    server.api.add("a", *range(50))
    server.api.add("quiet", 1)
    more = [f"other-{n}" for n in range(others)]
    for name in more:
        server.api.add(name, 1)
    verb = spawn(topics, "tail", "a", "quiet", *more, "--from", "1")
    verb.wait_for(49)
    verb.process.send_signal(signal.SIGSTOP)
    lasting = server.env
    server.env = {**lasting, "TOPICS_SESSION_TTL_MS": "1"}
    server.crash()
    # Opening a session reclaims expired ones.
    good(server.api.http.post("/v0/watch", json={"topics": {"a": {"tail": True}}}))
    server.env = lasting
    server.restart()
    server.api.add("a", *range(50))
    server.api.add("quiet", 2)
    verb.process.send_signal(signal.SIGCONT)
    verb.wait_for(100)
    assert verb.interrupt() == 0
    lines = [json.loads(line) for line in verb.out]
    assert [line["$seq"] for line in lines if line["topic"] == "a"] == list(range(2, 101))
    assert [line["$seq"] for line in lines if line["topic"] == "quiet"] == [2]
    assert "the connection broke; reconnecting" in verb.err
    assert "the session is gone; opening a new session at the same position" in verb.err


def test_a_gap_between_two_connections_is_printed(
    own: MakeServer, tmp_path: Path, spawn: Spawn
) -> None:
    server = on_a_port(own)
    topics = Topics(server.api.url, tmp_path)
    good(server.api.put("a", {"cap_records": 10}))
    server.api.add("a", *range(5))
    verb = spawn(topics, "tail", "a", "--from-start")
    verb.wait_for(5)
    # the verb cannot reconnect before the cap has evicted records
    verb.process.send_signal(signal.SIGSTOP)
    server.crash()
    server.api.add("a", *range(40))
    earliest = server.api.get_state("a")["earliest_seq"]
    assert earliest > 6
    verb.process.send_signal(signal.SIGCONT)
    verb.wait_for(5 + 1 + 46 - earliest)
    assert verb.seqs() == [1, 2, 3, 4, 5, *range(earliest, 46)]
    assert json.loads(verb.out[5])["tombstone"]["gap_from"] == 6
    assert f"gap: seqs 6-{earliest - 1} of a are gone" in verb.err
    assert verb.interrupt() == 0


def test_deleted_topics_end_it_when_none_is_left(
    topics: Topics, topic: str, api: Api, spawn: Spawn
) -> None:
    one, two = f"{topic}-1", f"{topic}-2"
    api.add(one, 1)
    api.add(two, 1)
    verb = spawn(topics, "tail", one, two, "--from-start")
    verb.wait_for(2)
    api.drop(one)
    eventually(lambda: f"{one} is deleted" in verb.err, "the deletion is told", WITHIN_S)
    api.add(two, 2)
    verb.wait_for(3)
    api.drop(two)
    assert verb.end() == 1
    assert "every topic is deleted" in verb.err


def test_a_topic_recreated_during_a_disconnect_is_read_from_its_start(
    own: MakeServer, tmp_path: Path, spawn: Spawn
) -> None:
    server = on_a_port(own)
    topics = Topics(server.api.url, tmp_path)
    server.api.add("a", *range(5))
    verb = spawn(topics, "tail", "a", "--from-start")
    verb.wait_for(5)
    verb.process.send_signal(signal.SIGSTOP)
    server.crash()
    server.api.drop("a")
    server.api.add("a", *range(7))
    verb.process.send_signal(signal.SIGCONT)
    verb.wait_for(5 + 1 + 7)
    assert verb.seqs() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7]
    assert "gap: a starts again at seq 1 (recreated)" in verb.err
    assert verb.interrupt() == 0


def test_an_idle_tail_ends_with_its_reader(topics: Topics, topic: str, api: Api) -> None:
    api.add(topic, 1)
    reader = topics.spawn("tail", topic, "--from-start", stderr=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stderr is not None
    assert reader.stdout.readline()
    reader.stdout.close()
    # No client appends any more: the verb must notice the closed output without writing to it.
    assert reader.wait(WITHIN_S) == 0
    with reader.stderr as errors:
        assert errors.read() == b""


def test_a_busy_tail_ends_with_its_reader(topics: Topics, topic: str, api: Api) -> None:
    for _ in range(20):
        api.add(topic, *["x" * 1000] * 500)
    reader = topics.spawn("tail", topic, "--from-start", stderr=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stderr is not None
    assert reader.stdout.readline()
    reader.stdout.close()
    assert reader.wait(WITHIN_S) == 0
    with reader.stderr as errors:
        assert errors.read() == b""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tail", "t-none"], "topic_not_found: "),
        (["watch", "t-none=5"], "topic_not_found: "),
        (["tail", "a b"], "invalid_request: "),
    ],
)
def test_a_refusal_is_exit_code_1(topics: Topics, words: list[str], message: str) -> None:
    ran = topics(*words)
    assert (ran.code, ran.out) == (1, b"")
    assert ran.message.startswith(message)


@pytest.mark.parametrize(
    "words",
    [
        ["tail"],
        ["tail", "t", "--from", "1", "--from-start"],
        ["tail", "t", "--limit", "0"],
        ["watch", "t=x"],
        ["watch", "t=-1"],
        ["watch", "t", "t=5"],
        ["watch", "t=99999999999999999999"],
    ],
)
def test_wrong_usage_is_exit_code_2(alone: Topics, words: list[str]) -> None:
    ran = alone(*words)
    assert ran.code == 2
    assert "Usage: " in ran.err


@pytest.mark.parametrize("words", [["tail", "t"], ["watch", "t"], ["pub", "t"]])
def test_no_server_is_exit_code_2(alone: Topics, words: list[str]) -> None:
    ran = alone(*words, stdin=b"1\n")
    assert ran.code == 2
    assert ran.message.startswith("cannot connect to http://127.0.0.1:1")


# -- watch ---------------------------------------------------------------------------------------


def test_watch_prints_frames_until_all_caught_up(topics: Topics, topic: str, api: Api) -> None:
    one, two, capped = f"{topic}-1", f"{topic}-2", f"{topic}-3"
    api.add(one, *range(10), tag="t")
    api.add(two, *range(10))
    good(api.put(capped, {"cap_records": 2}))
    api.add(capped, *range(10))
    words = ("--until-caught-up", "--limit", "4", "--tags", "--no-data")
    ran = topics.good("watch", one, f"{two}=8", f"{capped}=tail", *words)
    frames = ran.lines
    assert all(list(frame) == ["event", "id", "data"] for frame in frames)
    assert sorted(f["data"]["topic"] for f in frames if f["event"] == "caught-up") == [
        one,
        two,
        capped,
    ]
    pages = [f["data"] for f in frames if f["event"] == "record" and f["data"]["topic"] == one]
    assert [len(page["records"]) for page in pages] == [4, 4, 2]
    assert [(page["from_seq"], page["to_seq"]) for page in pages] == [(0, 4), (4, 8), (8, 10)]
    assert {frozenset(r) for page in pages for r in page["records"]} == {
        frozenset({"$seq", "$ts", "$tag"})
    }
    last = frames[-1]["id"]
    places = json.loads(base64.urlsafe_b64decode(last + "=" * (-len(last) % 4)))
    assert places == {one: 10, two: 10, capped: 10}


def test_watch_prints_tombstones_and_deletions(
    topics: Topics, topic: str, api: Api, spawn: Spawn
) -> None:
    good(api.put(topic, {"cap_records": 2}))
    api.add(topic, *range(10))
    verb = spawn(topics, "watch", topic)
    verb.wait_for(3)
    api.drop(topic)
    assert verb.end() == 1
    events = [json.loads(line)["event"] for line in verb.out]
    assert events == ["tombstone", "record", "caught-up", "topic-deleted"]


# -- pub -----------------------------------------------------------------------------------------


def payloads() -> list[bytes]:
    """The payloads of the webhook file, byte for byte."""
    lines = gzip.decompress(WEBHOOKS.read_bytes()).splitlines()
    return [line[line.index(b'"payload":') + 10 : -1] for line in lines]


def data_of(topics: Topics, topic: str) -> list[bytes]:
    """The data of all records, byte for byte."""
    lines = topics.good("read", topic).out.splitlines()
    return [line[line.index(b'"data":') + 7 : -1] for line in lines]


def test_published_lines_come_back_byte_for_byte(topics: Topics, topic: str) -> None:
    lines = payloads()
    ran = topics.good("pub", topic, "-", stdin=b"\n".join(lines)).value
    assert (ran["lines"], ran["deduped"], ran["last_seq"]) == (329, 0, 329)
    assert data_of(topics, topic) == lines


def test_published_lines_arrive_as_they_come(
    topics: Topics, topic: str, api: Api, spawn: Spawn
) -> None:
    verb = spawn(topics, "pub", topic, stdin=subprocess.PIPE)
    assert verb.process.stdin is not None
    for count in range(1, 4):
        verb.process.stdin.write(b"%d\n" % count)
        verb.process.stdin.flush()
        eventually(lambda n=count: _head(api, topic) == n, "the line is stored", WITHIN_S)  # type: ignore[misc]
    verb.process.stdin.close()
    assert verb.end() == 0
    assert json.loads(verb.out[0])["lines"] == 3


def _head(api: Api, topic: str) -> int:
    state = api.state(topic)
    return int(state.json()["head_seq"]) if state.status_code == 200 else 0


def test_the_same_lines_again_under_their_keys_are_stored_once(topics: Topics, topic: str) -> None:
    lines = b"".join(b"%d\n" % n for n in range(1, 501))
    first = topics.good("pub", topic, "--idempotent", "k", stdin=lines[: len(lines) // 2])
    stored = first.value["lines"]
    again = topics.good("pub", topic, "--idempotent", "k", stdin=lines).value
    # The first run's last line was cut; it has a number of its own, and the server still has its
    # key.
    assert (again["lines"], again["deduped"]) == (500, stored)
    assert [r["$seq"] for r in topics.good("read", topic).lines] == list(range(1, 501))


def test_records_with_their_parts(topics: Topics, topic: str) -> None:
    lines = b'{"data":[1 ,2],"tag":"t","node":"n","meta":{"k": 1}}\n\n{"data":null}\n'
    made = topics.good("pub", topic, "--records", "--durability", "fsync", stdin=lines)
    assert made.value["lines"] == 2
    first, second = topics.good("read", topic, "--tags").out.splitlines()
    assert b'"$node":"n","$tag":"t","data":[1 ,2],"meta":{"k": 1}' in first
    assert second.endswith(b'"data":null}')
    config = topics.good("info", topic).value["config"]
    assert config["durability"] == "fsync"


def test_a_refusal_names_its_line(topics: Topics, topic: str) -> None:
    ran = topics("pub", topic, "--no-create", stdin=b"1\n2\n")
    assert (ran.code, ran.out) == (1, b"")
    assert ran.message.startswith("lines 1 to 2: topic_not_found: ")
    long = b'{"data":1}\n{"data":2,"tag":"' + b"x" * 300 + b'"}\n'
    ran = topics("pub", topic, "--records", "--batch", "1", stdin=long)
    assert ran.code == 1
    assert ran.message.startswith("line 2: invalid_request: ")
    assert len(topics.good("read", topic).lines) == 1


def test_published_lines_survive_kill_9_once_each(
    own: MakeServer, tmp_path: Path, spawn: Spawn
) -> None:
    server = on_a_port(own)
    topics = Topics(server.api.url, tmp_path)
    verb = spawn(topics, "pub", "t", "--idempotent", "run", stdin=subprocess.PIPE)
    pipe = verb.process.stdin
    assert pipe is not None
    # Kills in the middle of the flow; the publisher cannot end before them, its input is open.
    for last in (2000, 4000):
        pipe.write(numbered(last - 1999, last))
        pipe.flush()
        eventually(lambda n=last: _head(server.api, "t") > n - 1500, "under way", WITHIN_S)  # type: ignore[misc]
        server.crash()
    eventually(lambda: _head(server.api, "t") == 4000, "all lines so far", WITHIN_S)
    # A kill that surely finds lines that no answer came for.
    broke = verb.err.count("the connection broke")
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    pipe.write(numbered(4001, 6000))
    pipe.flush()
    eventually(lambda: unread(pipe) == 0, "the publisher has the lines", WITHIN_S)
    time.sleep(0.3)  # until it has sent the first ones
    server.crash()
    pipe.close()
    assert verb.end() == 0
    assert json.loads(verb.out[0])["lines"] == 6000
    data = [r["data"]["n"] for r in server.api.read_all("t", limit=1000)]
    assert data == list(range(1, 6001))
    assert verb.err.count("the connection broke") == broke + 1


def numbered(first: int, last: int) -> bytes:
    """A line for each number."""
    return b"".join(b'{"n": %d}\n' % n for n in range(first, last + 1))


def unread(pipe: IO[bytes]) -> int:
    """How many bytes of a pipe its reader has not taken."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def test_an_idle_publisher_outlives_a_restart_without_keys(
    own: MakeServer, tmp_path: Path, spawn: Spawn
) -> None:
    server = on_a_port(own)
    topics = Topics(server.api.url, tmp_path)
    verb = spawn(topics, "pub", "t", stdin=subprocess.PIPE)
    assert verb.process.stdin is not None
    for count, step in enumerate([server.restart, server.crash, None], 1):
        verb.process.stdin.write(b"%d\n" % count)
        verb.process.stdin.flush()
        eventually(lambda n=count: _head(server.api, "t") == n, "stored", WITHIN_S)  # type: ignore[misc]
        if step is not None:
            step()
    verb.process.stdin.close()
    assert verb.end() == 0
    assert [r["data"] for r in server.api.read_all("t")] == [1, 2, 3]


def test_tail_n_shows_the_last_records_and_then_what_comes(
    topics: Topics, topic: str, api: Api, spawn: Spawn
) -> None:
    api.add(topic, *range(1, 31))
    verb = spawn(topics, "tail", topic, "-n", "10", "--limit", "12")
    eventually(lambda: len(verb.out) == 10, "the last ten", WITHIN_S)
    api.add(topic, 31, 32)
    assert verb.end() == 0
    assert verb.seqs() == list(range(21, 33))


def test_tail_n_of_several_topics_names_them_and_stops_at_the_limit(
    topics: Topics, topic: str, api: Api
) -> None:
    other = f"{topic}.b"
    api.add(topic, "x", "y", "z")
    api.add(other, "u")
    found = topics.good("tail", topic, other, "-n", "2", "--limit", "3").lines
    assert [(line["topic"], line["data"]) for line in found] == [
        (topic, "y"),
        (topic, "z"),
        (other, "u"),
    ]


def test_tail_n_and_a_start_exclude_each_other(alone: Topics) -> None:
    for words in (["--from", "1"], ["--from-start"], ["--strong"]):
        ran = alone("tail", "t", "-n", "1", *words)
        assert (ran.code, "-n " in ran.err) == (2, True)
