"""The benchmarks' PostgreSQL client: bytes of requests, answers in pieces, refusals."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from benchmarks.clients import postgres
from benchmarks.clients.load import TAIL_BYTES, Connection
from benchmarks.clients.postgres_queue import POSTGRES_WIRES, tagged
from benchmarks.clients.queue_wires import WireError, numbers, payload
from benchmarks.clients.requests import data_text
from benchmarks.servers import peers

WELCOME = (
    postgres.message(b"R", struct.pack(">I", 0))
    + postgres.message(b"S", b"server_version\x0015.4\x00")
    + postgres.message(b"K", struct.pack(">II", 7, 8))
    + postgres.READY
)
REFUSED = postgres.message(b"E", b"SERROR\x00VERROR\x00C42P01\x00Mno table\x00\x00")


def row(*values: bytes | None) -> bytes:
    """A DataRow."""
    columns = b"".join(
        struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
        for value in values
    )
    return postgres.message(b"D", struct.pack(">H", len(values)) + columns)


class Scripted:
    """A socket that answers with these pieces, whatever the client sends."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.sent: list[bytes] = []
        self._pieces = list(pieces)

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)

    def recv(self, size: int) -> bytes:
        piece = self._pieces.pop(0) if self._pieces else b""
        assert len(piece) <= size
        return piece


def session(*pieces: bytes) -> tuple[postgres.Session, Scripted]:
    """A session over a scripted socket; the first pieces answer its start-up."""
    scripted = Scripted(pieces)
    return postgres.Session(cast(socket.socket, scripted)), scripted


def bytewise(data: bytes) -> list[bytes]:
    """The data in pieces of one byte."""
    return [data[at : at + 1] for at in range(len(data))]


# -- requests ------------------------------------------------------------------------------------


def test_the_startup_names_version_user_database_and_settings() -> None:
    pairs = b"user\x00topics\x00database\x00postgres\x00synchronous_commit\x00off\x00\x00"
    body = b"\x00\x03\x00\x00" + pairs
    assert postgres.startup({"synchronous_commit": "off"}) == (
        struct.pack(">I", len(body) + 4) + body
    )


def test_a_call_is_bind_execute_and_sync() -> None:
    bound = b"\x00one\x00\x00\x01\x00\x01\x00\x02\x00\x00\x00\x02ab\x00\x00\x00\x00\x00\x00"
    assert postgres.call(b"one", b"ab", b"", binary=True) == (
        b"B" + struct.pack(">I", len(bound) + 4) + bound + b"E\x00\x00\x00\x09\x00\x00\x00\x00\x00"
        b"S\x00\x00\x00\x04"
    )
    as_text = postgres.call(b"one", b"ab", b"")
    assert as_text == postgres.call(b"one", b"ab", b"", binary=True).replace(
        b"one\x00\x00\x01\x00\x01", b"one\x00\x00\x01\x00\x00"
    )


def test_a_statement_is_parsed_with_the_types_of_its_parameters() -> None:
    body = b"one\x00SELECT $1\x00\x00\x01\x00\x00\x00\x14"
    assert postgres.parse(b"one", "SELECT $1", postgres.INT8) == (
        b"P" + struct.pack(">I", len(body) + 4) + body
    )


def test_an_array_has_one_dimension_from_one_on() -> None:
    assert postgres.array(postgres.INT4, [b"\x00\x00\x00\x07"]) == (
        b"\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x17\x00\x00\x00\x01\x00\x00\x00\x01"
        b"\x00\x00\x00\x04\x00\x00\x00\x07"
    )
    assert postgres.array(postgres.JSON, []) == b"\x00" * 8 + b"\x00\x00\x00\x72"


# -- answers -------------------------------------------------------------------------------------


def test_a_session_reads_rows_that_come_byte_by_byte() -> None:
    answer = row(b"1", None) + row(b"2", b"b") + postgres.ending(b"SELECT 2")
    opened, scripted = session(*bytewise(WELCOME), *bytewise(answer))
    assert opened.run("SELECT 1") == [[b"1", b""], [b"2", b"b"]]
    assert scripted.sent == [postgres.startup(), b"Q\x00\x00\x00\x0dSELECT 1\x00"]


def test_a_session_raises_the_servers_message_and_goes_on() -> None:
    opened, _ = session(WELCOME, REFUSED + postgres.READY, row(b"1") + postgres.ending(b"SELECT 1"))
    with pytest.raises(postgres.PostgresError, match="ERROR: no table"):
        opened.run("SELECT 1 FROM nowhere")
    assert opened.run("SELECT 1") == [[b"1"]]


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([postgres.message(b"R", struct.pack(">I", 10) + b"SCRAM-SHA-256\x00\x00")], "password"),
        ([REFUSED], "no table"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "closed the connection"),
        ([b"E\x00\x00\x00\x01"], "no message of PostgreSQL"),
        ([], "closed the connection"),
    ],
)
def test_a_start_that_is_refused_says_why(pieces: list[bytes], why: str) -> None:
    with pytest.raises(postgres.PostgresError, match=why):
        session(*pieces)


def test_a_greeting_is_answered_after_its_second_ready() -> None:
    parsed = postgres.PARSED + postgres.READY
    assert not postgres.is_greeted(b"")
    assert not postgres.is_greeted(WELCOME)
    assert not postgres.is_greeted(WELCOME + parsed[:-1])
    assert postgres.is_greeted(WELCOME + parsed)
    with pytest.raises(postgres.PostgresError, match="no table"):
        postgres.is_greeted(WELCOME + REFUSED + postgres.READY)


# -- the queue -----------------------------------------------------------------------------------

WIRE = POSTGRES_WIRES["PostgreSQL"]


def claimed(*jobs: int) -> bytes:
    """The answer to a claim: each job on its second try."""
    rows = b"".join(row(b"%d" % (job + 100), b"2", payload(job)) for job in jobs)
    return postgres.BOUND + rows + postgres.ending(b"UPDATE %d" % len(jobs))


def test_an_ack_names_each_claimed_row_and_its_try() -> None:
    answer = claimed(3, 4)
    assert numbers(answer) == [3, 4]
    assert WIRE.claimed(answer, 2)
    assert WIRE.ack(0, answer) == postgres.call(
        b"ack",
        postgres.array(postgres.INT8, [struct.pack(">q", 103), struct.pack(">q", 104)]),
        postgres.array(postgres.INT4, [struct.pack(">i", 2)] * 2),
        binary=True,
    )


def test_answers_are_complete_with_their_last_byte() -> None:
    answer = claimed(3)
    assert [WIRE.claimed(answer[:size], 1) for size in range(len(answer))] == [False] * len(answer)
    assert WIRE.left_count(row(b"12") + postgres.ending(b"SELECT 1")) == 12


def test_fewer_jobs_than_asked_for_are_an_error() -> None:
    with pytest.raises(WireError, match="UPDATE 2 expected"):
        WIRE.claimed(claimed(3), 2)
    with pytest.raises(WireError, match="DELETE 2 expected"):
        WIRE.acked(postgres.BOUND + postgres.ending(b"DELETE 1"), 2)
    with pytest.raises(WireError, match="ERROR: no table"):
        tagged(REFUSED + postgres.READY, b"INSERT 0 1")


def test_one_job_is_inserted_without_an_array() -> None:
    one, two = payload(1), payload(2)
    assert WIRE.enqueue(0, [one]) == postgres.call(b"one", one, binary=True)
    assert WIRE.enqueue(0, [one, two]) == postgres.call(
        b"enqueue", postgres.array(postgres.JSON, [one, two]), binary=True
    )


def test_a_notified_worker_claims_after_the_word() -> None:
    notified = POSTGRES_WIRES["PostgreSQL, notified"]
    listening = postgres.ending(b"LISTEN")
    word = postgres.message(b"A", struct.pack(">I", 7) + b"jobs\x00\x00")
    assert not notified.waited(listening)
    assert not notified.waited(listening + word[:-1])
    assert notified.waited(listening + word)
    assert notified.fetch(4) == WIRE.claim(4, 1, 0)
    assert WIRE.fetch(4) == b""


# -- the load generator --------------------------------------------------------------------------


def test_the_load_generator_keeps_the_end_of_an_answer_only() -> None:
    # One connection of the generator, without its socket.
    connection = Connection.__new__(Connection)
    connection.tail, connection.wrong = b"", b""
    ending = postgres.ending(b"SELECT 1000")
    answer = b"".join(row(data_text(number, "t")) for number in range(20)) + ending
    for size in (1, 7, 512, len(answer)):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        done = [
            connection.receive_postgres(bytearray(piece), len(piece), ending) for piece in pieces
        ]
        assert done == [False] * (len(pieces) - 1) + [True]
        assert connection.wrong == b""
        assert len(connection.tail) <= TAIL_BYTES
    fewer = bytearray(postgres.ending(b"SELECT 999"))
    assert connection.receive_postgres(fewer, len(fewer), ending)
    assert b"SELECT 999" in connection.wrong


# -- the program ---------------------------------------------------------------------------------


def test_the_newest_version_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("9.6", "15", "13"):
        (tmp_path / version / "bin").mkdir(parents=True)
        (tmp_path / version / "bin" / "postgres").touch()
    monkeypatch.setattr(peers, "POSTGRES_VERSIONS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert peers.postgres_program() == (tmp_path / "15" / "bin" / "postgres").resolve()


def test_a_missing_program_is_named_with_its_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "POSTGRES_VERSIONS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(peers.NotInstalled, match="apt-get install postgresql"):
        peers.postgres_program()
