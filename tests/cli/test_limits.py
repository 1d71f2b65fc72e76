"""Messages and actions of clients with a server that has a low limit of records, and with one that
does not answer.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import MakeServer, Topics
from topics_server.client import IdempotentProducer, Undelivered

LINES = b"".join(b"%d\n" % number for number in range(100))


@pytest.fixture
def narrow(own: MakeServer, tmp_path: Path) -> Topics:
    """The command, with a server that accepts ten records at once."""
    return Topics(own({"TOPICS_MAX_BATCH_RECORDS": "10"}).start().url, tmp_path)


def test_a_batch_that_is_too_large_is_divided_or_refused(narrow: Topics) -> None:
    assert narrow.good("append", "a", "-", stdin=LINES).value["lines"] == 100
    assert [r["data"] for r in narrow.good("read", "a").lines] == list(range(100))
    narrow.good("stream", "create", "s")
    narrow.good("stream", "append", "s", stdin=LINES)
    assert narrow.good("stream", "read", "s").lines == list(range(100))
    ran = narrow("load", "l", "-", stdin=LINES)
    assert ran.code == 1
    assert ran.message.endswith("run it again with --batch-records 10")
    narrow.good("load", "l", "-", "--batch-records", "10", stdin=LINES)
    ran = narrow("pub", "p", stdin=LINES)
    assert ran.code == 1
    assert "publish with --batch 10;" in ran.message
    narrow.good("pub", "p", "--batch", "10", stdin=LINES)


def test_a_producer_error_names_the_setting(narrow: Topics) -> None:
    with (
        pytest.raises(Undelivered, match="batch_records=10, or raise TOPICS_MAX_BATCH_RECORDS"),
        IdempotentProducer("t", "p", url=narrow.url) as producer,
    ):
        send_all(producer)
    with IdempotentProducer("t", "q", url=narrow.url, batch_records=10) as producer:
        send_all(producer)
    assert len(narrow.good("read", "t").lines) == 100


def send_all(producer: IdempotentProducer) -> None:
    for number in range(100):
        producer.send(number)


# -- no server answers ---------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[str]:
    """A URL where connections are neither accepted nor refused: the queue of its listener is
    full.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for one in waiting:
            one.close()


@pytest.mark.parametrize("words", [["ls"], ["stream", "read", "x"], ["pub", "x"]], ids=" ".join)
def test_a_machine_that_does_not_answer_is_reported_within_seconds(
    alone: Topics, silent: str, words: list[str]
) -> None:
    began = time.monotonic()
    ran = alone(*words, "--url", silent, stdin=b"1\n")
    assert ran.code == 2
    assert ran.message.endswith("no answer within 5 s")
    assert time.monotonic() - began < 20  # the client's five seconds, and the start of a process


def test_a_producer_tells_the_time_out_and_how_long_it_tries(
    silent: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="topics_server.client")
    began = time.monotonic()
    producer = IdempotentProducer("t", "p", url=silent, patience_ms=1000)
    with pytest.raises(Undelivered, match="no answer within 4 s"), producer:
        producer.send(1)
    told, *_ = caplog.records
    assert told.message == (
        f"producer p: cannot connect to {silent}: no answer within 4 s; "
        "trying again for 1 s (patience_ms)"
    )
    assert time.monotonic() - began < 20
