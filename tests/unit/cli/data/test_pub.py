"""`cli.data.pub` against a WebSocket server that answers, refuses or breaks as a case requires."""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import websockets.sync.client
import websockets.sync.server
from click.testing import CliRunner, Result
from websockets.exceptions import ConnectionClosedError, InvalidMessage
from websockets.sync.server import ServerConnection

from topics_server.cli.data import pub
from topics_server.cli.data.cutting import BadLine, Cutter, Shape, whole_records
from topics_server.cli.data.pub import Input, PublishBatch

Command = dict[str, Any]
# The reaction to a command: answers, or None to break the connection.
Play = Callable[[Command], list[Command] | None]


class Fake:
    """A server; `commands` are all received ones, over all connections."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.headers: list[dict[str, str]] = []
        self.play: Play = self.acknowledge
        self.stored: dict[str, int] = {}  # idempotency key -> seq
        self.seq = 0

    def acknowledge(self, command: Command) -> list[Command]:
        """The answer of a server that stores."""
        key = command.get("idempotency_key")
        known = self.stored.get(key) if key is not None else None
        if known is None:
            self.seq += len(command["records"])
            if key is not None:
                self.stored[key] = self.seq
        seq = known or self.seq
        ids = {"request_id": command["request_id"], "topic": command["topic"]}
        return [{"op": "ack", **ids, "last_seq": seq, "head_seq": self.seq, "deduped": bool(known)}]

    def __call__(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        self.headers.append(dict(connection.request.headers.raw_items()))
        for text in connection:
            command = json.loads(text)
            self.commands.append(command)
            answers = self.play(command)
            if answers is None:
                # Not a close frame: a killed server sends none.
                connection.socket.shutdown(socket.SHUT_RDWR)
                return
            for answer in answers:
                connection.send(json.dumps(answer))


@pytest.fixture
def fake() -> Iterator[tuple[Fake, str]]:
    """The fake and its URL."""
    found = Fake()
    with websockets.sync.server.serve(found, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found, f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def run(url: str, *words: str, lines: bytes) -> Result:
    """Run the verb in this process."""
    words = ("--url", url, "--token", "secret", "--json", "jobs", *words)
    return CliRunner().invoke(pub.command, list(words), input=lines)


def test_lines_become_records_byte_for_byte_in_order(fake: tuple[Fake, str]) -> None:
    server, url = fake
    lines = b'{"b":1,  "a":2}\n\n"x"\r\n1\n[2]'
    ran = run(url, "--create", "--durability", "fsync", "--node", "n", "--batch", "3", lines=lines)
    assert ran.exit_code == 0, ran.output
    summary = json.loads(ran.stdout)
    assert (summary["lines"], summary["last_seq"], summary["deduped"]) == (4, 4, 0)
    data = [record["data"] for command in server.commands for record in command["records"]]
    assert data == [{"b": 1, "a": 2}, "x", 1, [2]]
    first = server.commands[0]
    assert (first["op"], first["topic"], first["create"]) == ("publish", "jobs", True)
    assert first["config"] == {"durability": "fsync"}
    assert first["return_seqs"] is False
    assert "idempotency_key" not in first
    assert {record["node"] for record in first["records"]} == {"n"}
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_a_refused_line_is_named_and_nothing_follows_it(fake: tuple[Fake, str]) -> None:
    server, url = fake

    def play(command: Command) -> list[Command]:
        if command["records"][0]["data"] == 3:
            ids = {"op": "error", "request_id": command["request_id"]}
            return [{**ids, "code": "record_too_large", "message": "too much"}]
        return server.acknowledge(command)

    server.play = play
    ran = run(url, "--batch", "1", lines=b"1\n2\n3\n")
    assert ran.exit_code == 1
    assert "line 3: record_too_large: too much; 2 lines are acknowledged" in ran.stderr
    assert ran.stdout == ""


def test_a_bad_line_is_named_and_what_was_before_it_is_stored(fake: tuple[Fake, str]) -> None:
    server, url = fake
    ran = run(url, lines=b"1\n2\n{\n4\n")
    assert ran.exit_code == 1
    assert "line 3: not JSON" in ran.stderr
    assert server.seq == 2


def test_without_keys_a_broken_connection_leaves_doubt_and_says_so(fake: tuple[Fake, str]) -> None:
    server, url = fake
    server.play = lambda command: (
        None if command["request_id"] == "2" else server.acknowledge(command)
    )
    ran = run(url, "--batch", "1", lines=b"1\n2\n")
    assert ran.exit_code == 2
    assert "line 2 may be stored or not" in ran.stderr
    assert [command["request_id"] for command in server.commands] == ["1", "2"]


def test_with_keys_what_was_not_acknowledged_is_sent_again(fake: tuple[Fake, str]) -> None:
    server, url = fake
    broken: list[int] = []

    def play(command: Command) -> list[Command] | None:
        answer = server.acknowledge(command)  # the record is stored, and then the answer is lost
        line = int(command["request_id"])
        if line % 4 == 0 and line not in broken:
            broken.append(line)
            return None
        return answer

    server.play = play
    ran = run(url, "--idempotent", "run-1", lines=b"".join(b"%d\n" % n for n in range(1, 21)))
    assert ran.exit_code == 0, ran.output
    assert broken == [4, 8, 12, 16, 20]
    assert server.seq == 20
    assert server.stored == {f"run-1:{n}": n for n in range(1, 21)}
    summary = json.loads(ran.stdout)
    assert summary["lines"] == 20
    # Answers in flight are lost with a broken connection: those lines come again, too.
    assert 5 <= summary["deduped"] <= len(server.commands) - 20
    assert len(server.headers) == 6
    again = run(url, "--idempotent", "run-1", lines=b"".join(b"%d\n" % n for n in range(1, 23)))
    assert json.loads(again.stdout)["deduped"] == 20
    assert server.seq == 22


def test_a_server_that_shuts_down_is_waited_for(fake: tuple[Fake, str]) -> None:
    server, url = fake

    def play(command: Command) -> list[Command] | None:
        if len(server.headers) > 1:
            return server.acknowledge(command)
        if command["request_id"] == "1":
            ids = {"op": "error", "request_id": "1"}
            return [{**ids, "code": "shutting_down", "message": "the server is shutting down"}]
        return None

    server.play = play
    ran = run(url, "--idempotent", "k", lines=b"1\n2\n3\n")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["lines"] == server.seq == 3


def test_a_handshake_that_breaks_is_tried_again(
    fake: tuple[Fake, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = fake
    server.play = lambda command: None if len(server.headers) == 1 else server.acknowledge(command)
    dial = websockets.sync.client.connect
    # The observed effects of a server that dies during the handshake.
    ends = [ConnectionClosedError(None, None), InvalidMessage("no head"), ConnectionResetError()]

    def connect(*args: Any, **options: Any) -> Any:
        if server.headers and ends:
            raise ends.pop()
        return dial(*args, **options)

    monkeypatch.setattr(websockets.sync.client, "connect", connect)
    ran = run(url, "--idempotent", "k", lines=b"1\n2\n3\n")
    assert ran.exit_code == 0, ran.output
    assert ends == []
    assert server.seq == 3


def test_no_more_than_the_window_is_under_way(fake: tuple[Fake, str]) -> None:
    server, url = fake
    held: list[Command] = []
    most = 0

    def play(command: Command) -> list[Command]:
        nonlocal most
        held.append(command)
        most = max(most, len(held))
        if len(held) < pub.WINDOW and int(command["request_id"]) < 100:
            return []
        answers = [answer for item in held for answer in server.acknowledge(item)]
        held.clear()
        return answers

    server.play = play
    ran = run(url, "--batch", "1", lines=b"".join(b"%d\n" % n for n in range(1, 101)))
    assert ran.exit_code == 0, ran.output
    assert (most, server.seq) == (pub.WINDOW, 100)


def test_an_unreachable_server_is_exit_code_2() -> None:
    ran = run("http://127.0.0.1:1", lines=b"1\n")
    assert ran.exit_code == 2
    assert ran.stderr.startswith("cannot connect to http://127.0.0.1:1")


def test_a_server_that_refuses_the_socket_is_exit_code_1() -> None:
    def refuse(connection: ServerConnection, request: object) -> Any:
        envelope = '{"error":{"code":"throttled","message":"too many"}}'
        return connection.respond(429, envelope)

    def unused(connection: ServerConnection) -> None:
        raise AssertionError("refused before")

    with websockets.sync.server.serve(unused, "127.0.0.1", 0, process_request=refuse) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        ran = run(f"http://127.0.0.1:{server.socket.getsockname()[1]}", lines=b"1\n")
        server.shutdown()
        thread.join()
    assert ran.exit_code == 1
    assert ran.stderr.startswith("throttled: too many")


def test_a_key_a_line_excludes_batches() -> None:
    ran = run("http://127.0.0.1:1", "--idempotent", "k", "--batch", "2", lines=b"")
    assert ran.exit_code == 2
    assert "leave --batch out" in ran.stderr


# -- the input -----------------------------------------------------------------------------------


class Blocks(io.RawIOBase):
    """Standard input that returns these blocks, one for each read."""

    def __init__(self, *blocks: bytes) -> None:
        self.blocks = [*blocks, b""]

    def read(self, size: int = -1, /) -> bytes:
        """The next block."""
        return self.blocks.pop(0)


def batches(
    monkeypatch: pytest.MonkeyPatch, *blocks: bytes, size: int = 3
) -> Iterator[PublishBatch]:
    """Batches of an input that arrives in these blocks."""

    class Standard:
        buffer = Blocks(*blocks)

    monkeypatch.setattr(sys, "stdin", Standard)
    return Input(Cutter(Shape()), None, size).batches()


def found(items: Iterator[PublishBatch]) -> list[tuple[int, list[bytes]]]:
    """First lines and data."""
    return [(item.first_line, [r[8:-1] for r in item.records]) for item in items]


def test_what_is_there_goes_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = (b"1\n2\n3\n4\n5", b"5\n", b"\n \n6", b"6", b"6\n7")
    assert found(batches(monkeypatch, *blocks)) == [
        (1, [b"1", b"2", b"3"]),
        (4, [b"4"]),
        (5, [b"55"]),
        (6, [b"666"]),
        (7, [b"7"]),
    ]


def test_large_records_part_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    big = b'"' + b"x" * (pub.BATCH_BYTES // 2) + b'"'
    lines = b"\n".join([big, big, b"3", b"4"])
    sizes = [(item.first_line, len(item.records)) for item in batches(monkeypatch, lines, size=9)]
    assert sizes == [(1, 1), (2, 2), (4, 1)]


def test_lines_before_a_bad_one_come_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    items = batches(monkeypatch, b"1\n2\n3\n4\nx\n6\n")
    assert found(iter([next(items), next(items)])) == [(1, [b"1", b"2", b"3"]), (4, [b"4"])]
    with pytest.raises(BadLine, match="line 5: not JSON"):
        next(items)


def test_whole_records_keep_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    class Standard:
        buffer = Blocks(b'{"data":1,"node":"own","tag":"t"}\n{"data":2}\n')

    monkeypatch.setattr(sys, "stdin", Standard)
    (batch,) = Input(Cutter(whole_records()), "all", 9).batches()
    assert batch.records == [
        b'{"data":1,"tag":"t","node":"own"}',
        b'{"data":2,"node":"all"}',
    ]
