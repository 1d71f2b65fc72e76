"""`cli.queues.enqueue`: the request for a job, and arguments that are no valid job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.unit.client.fake import Broken, FakeQueue, serving
from topics_server.cli.queues import enqueue


@pytest.fixture
def served() -> Iterator[tuple[str, FakeQueue]]:
    """A queue server."""
    with serving() as found:
        yield found


def run(url: str, *words: str, stdin: bytes | None = None) -> Result:
    """Run the verb in this process."""
    return CliRunner().invoke(enqueue.command, ["--url", url, "q", *words], input=stdin)


def sent(fake: FakeQueue) -> Any:
    """The body of the last append."""
    return fake.calls("append")[-1]


def test_what_is_sent(served: tuple[str, FakeQueue]) -> None:
    url, fake = served
    ran = run(url, '{"n" : 1e400}', "--key", "k", "--json")
    assert ran.exit_code == 0
    assert json.loads(ran.stdout)["first_seq"] == 1
    assert sent(fake) == {
        "records": [{"data": {"n": float("inf")}}],
        "idempotency_key": "k",
        "create": False,
        "config": {"type": "queue"},
    }
    words = ("--tag", "t", "--meta", '{"m":1}', "--delay", "5", "--create")
    for stdin, more in ((b' {"x":[]}\n', ()), (b'{"x":[]}', ("-",))):
        assert run(url, *more, *words, stdin=stdin).exit_code == 0
        assert sent(fake)["records"] == [
            {"data": {"x": []}, "tag": "t", "meta": {"m": 1}, "delay_ms": 5}
        ]
        assert sent(fake)["create"] is True
    assert run(url, "1", "--at", "7").exit_code == 0
    assert sent(fake)["records"] == [{"data": 1, "deliver_at_ms": 7}]


def test_a_try_that_broke_is_one_job(served: tuple[str, FakeQueue]) -> None:
    url, fake = served
    fake.faults["append"].extend([Broken(), Broken(done=True), Broken()])
    ran = run(url, "1", "--json")
    assert ran.exit_code == 0
    assert json.loads(ran.stdout)["deduped"]
    assert len(fake.jobs) == 1
    fake.faults["append"].extend([Broken()] * 50)
    assert run(url, "1").exit_code == 2
    assert run("http://127.0.0.1:1", "1").exit_code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("hello",), "topics enqueue q '\"hello\"'"),
        (("{",), "the data is not JSON"),
        (("1 2",), "the data is not JSON"),
        (("",), "the data is not JSON"),
        (("1", "--meta", "[]"), "--meta is not a JSON object"),
        (("1", "--delay", "1", "--at", "1"), "give one of them"),
        (("1", "--delay", "-1"), "--delay"),
        (("1", "2"), "unexpected extra argument"),
    ],
)
def test_what_is_no_job(
    words: tuple[str, ...], message: str, served: tuple[str, FakeQueue]
) -> None:
    url, fake = served
    ran = run(url, *words)
    assert ran.exit_code == 2
    assert message in ran.stderr
    assert fake.asked == []
