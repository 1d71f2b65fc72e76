"""`cli.queues.work`: the input of a command, the meaning of its exit, and how it is ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.contract.driver import eventually
from tests.unit.client.fake import FakeQueue, Refusal, serving
from topics_server.cli.queues import work

Served = tuple[str, FakeQueue]


@pytest.fixture
def served() -> Iterator[Served]:
    """A queue server."""
    with serving() as found:
        yield found


def run(url: str, *words: str) -> Result:
    """Run the verb in this process, until it ends."""
    return CliRunner().invoke(work.command, ["--url", url, "--token", "secret", "q", *words])


def until(happened: Callable[[], bool], then: Callable[[], object] = lambda: None) -> None:
    """Send this process SIGTERM after an event, then do another action."""

    def wait() -> None:
        try:
            eventually(happened, "what the verb is stopped after", 20)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        then()

    threading.Thread(target=wait).start()


def shell(script: str) -> tuple[str, ...]:
    """A command."""
    return ("--", "sh", "-c", script)


def test_a_command_gets_its_job(served: Served, tmp_path: Path) -> None:
    url, fake = served
    fake.add({"n": 1}, tag="a b=c\n'x'", meta={"m": 1})
    out = tmp_path / "out"
    script = f"{{ cat; env | grep ^TOPICS_JOB; }} >{out}"
    until(lambda: not fake.jobs)
    ran = run(url, *shell(script))
    assert ran.exit_code == 0, ran.output
    assert ran.stderr == "stopped; 1 done\n"
    assert out.read_text().splitlines()[0].startswith('{"n": 1}TOPICS_JOB')
    text = out.read_text()
    for line in ("TOPICS_JOB_SEQ=1", "TOPICS_JOB_DELIVERIES=1", "TOPICS_JOB_TAG=a b=c\n'x'"):
        assert line.splitlines()[0] in text
    assert fake.tokens == {"Bearer secret"}


def test_the_whole_job(served: Served, tmp_path: Path) -> None:
    url, fake = served
    fake.add({"n": 1}, tag="t", meta={"m": 1})
    fake.add(2)
    out = tmp_path / "out"
    until(lambda: not fake.jobs)
    assert run(url, "--whole", *shell(f"cat >>{out}; echo >>{out}")).exit_code == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    first = {"$seq": 1, "$ts": 1, "deliveries": 1}
    assert lines == [
        {**first, "$tag": "t", "data": {"n": 1}, "meta": {"m": 1}},
        {**first, "$seq": 2, "data": 2},
    ]


def test_exit_codes_decide(served: Served) -> None:
    url, fake = served
    fake.add("exit 0", "exit 3", "kill -9 $$")
    # One call may ack both jobs, so the test counts jobs and not calls.
    until(lambda: sum(len(body["seqs"]) for body in fake.calls("nack")) == 2)
    words = ("--retry-ms", "600000", "--retry-max-ms", "600000", "--concurrency", "3")
    ran = run(url, *words, *shell('eval "$(tr -d \\")"'))
    assert ran.exit_code == 0
    assert "the command exited with 3" in ran.stderr
    assert "the command was ended by signal 9" in ran.stderr
    assert ran.stderr.endswith("stopped; 1 done, 2 failed\n")
    assert sorted(fake.jobs) == [2, 3]


def test_the_input_is_whole_whatever_happens_to_us(served: Served, tmp_path: Path) -> None:
    url, fake = served
    fake.add(1)
    out = tmp_path / "out"
    until(lambda: not fake.jobs)
    # With a pipe a command could not distinguish the end of the job from the end of its worker.
    code = "import os,stat,sys; open(sys.argv[1],'w').write(str(stat.S_ISREG(os.fstat(0).st_mode)))"
    assert run(url, "--", sys.executable, "-c", code, str(out)).exit_code == 0
    assert out.read_text() == "True"


def test_a_command_that_ignores_its_input(served: Served) -> None:
    url, fake = served
    fake.add("x" * 1_000_000)
    until(lambda: not fake.jobs)
    assert run(url, "--", "true").stderr == "stopped; 1 done\n"


def test_a_lost_lease_ends_the_command_and_what_it_started(served: Served, tmp_path: Path) -> None:
    url, fake = served
    fake.add(1)
    out = tmp_path / "pids"
    # A child in the background and one in the foreground: both are in the group.
    script = f"sleep 600 & echo $! $$ >{out}; wait"

    def begun() -> bool:
        return out.exists() and len(out.read_text().split()) == 2

    def steal() -> None:
        eventually(begun, "the command runs", 20)
        fake.steal(1)

    threading.Thread(target=steal).start()
    until(lambda: begun() and not any(alive(int(pid)) for pid in out.read_text().split()))
    ran = run(url, "--lease-ms", "150", *shell(script))
    assert ran.stderr.endswith("stopped; 1 lost\n")
    assert list(fake.jobs) == [1]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_stop_lets_the_command_finish(served: Served, tmp_path: Path) -> None:
    url, fake = served
    fake.add(1)
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    os.mkfifo(go_on)
    until(begun.exists, lambda: go_on.write_text("now\n"))
    ran = run(url, *shell(f"touch {begun}; cat {go_on}"))
    assert (ran.exit_code, ran.stderr) == (0, "stopped; 1 done\n")
    assert fake.jobs == {}


def test_a_stop_ends_what_takes_too_long(served: Served, tmp_path: Path) -> None:
    url, fake = served
    fake.add(1)
    begun = tmp_path / "begun"
    until(begun.exists)
    ran = run(url, "--poll", "--grace-ms", "20", *shell(f"touch {begun}; exec sleep 600"))
    assert (ran.exit_code, ran.stderr) == (0, "stopped; 1 released\n")
    assert list(fake.jobs) == [1]
    assert not fake.leased


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--", "no-such-command-here"), "there is no command 'no-such-command-here'"),
        (("--", "A=b"), "there is no command 'A=b'"),
        ((), "Missing argument"),
        (("--lease-ms", "99", "--", "true"), "--lease-ms"),
        (("--concurrency", "0", "--", "true"), "--concurrency"),
        (
            ("--retry-ms", "9", "--retry-max-ms", "8", "--", "true"),
            "--retry-max-ms must be at least",
        ),
        (("--node", "n" * 129, "--", "true"), "node must have 1 to 128 bytes"),
    ],
)
def test_wrong_words(words: tuple[str, ...], message: str) -> None:
    ran = run("http://127.0.0.1:1", *words)
    assert ran.exit_code == 2
    assert message in ran.stderr


def test_options_of_the_command_are_its_own(served: Served, tmp_path: Path) -> None:
    url, fake = served
    fake.add(1)
    out = tmp_path / "out"
    until(lambda: not fake.jobs)
    code = "import sys; open(sys.argv[1], 'w').write(' '.join(sys.argv[2:]))"
    words = ("--", sys.executable, "-c", code, str(out), "--node", "-h", "--", "x")
    assert run(url, *words).exit_code == 0
    assert out.read_text() == "--node -h -- x"


def test_what_the_server_refuses(served: Served) -> None:
    url, fake = served
    fake.faults["state"].append(Refusal(404, "topic_not_found"))
    ran = run(url, "--", "true")
    assert (ran.exit_code, ran.stderr) == (1, "topic_not_found: m\n")
    fake.config = {"type": "log"}
    ran = run(url, "--", "true")
    assert (ran.exit_code, ran.stderr) == (1, "not_a_queue: topic 'q' is a plain log\n")
