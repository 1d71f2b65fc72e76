"""Queues as a user runs them: verbs, workers that are killed, paused and stopped, a real server.

Leases last a minute in tests where a job must return before its lease ends, and are short in tests
where the lease itself has to end.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import MakeServer, Topics
from tests.cli.test_streams import on_a_port
from tests.contract.driver import ROOT, Api, eventually, good
from topics_server.client import Backoff, Job, NewJob, Queue, Retry, Stats, Worker

Spawn = Callable[..., subprocess.Popen[bytes]]
WITHIN_S = 30.0
MINUTE = ("--lease-ms", "60000")


@pytest.fixture
def spawn(topics: Topics) -> Iterator[Spawn]:
    """Start a verb; if it still runs at the end, it is stopped, then killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str, **options: Any) -> subprocess.Popen[bytes]:
        started.append(topics.spawn(*words, **{"stderr": subprocess.DEVNULL, **options}))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def queue(topic: str, api: Api) -> str:
    """A queue for this test alone."""
    good(api.put(topic, {"type": "queue"}))
    return topic


def counters(api: Api, queue: str) -> dict[str, int]:
    """The `queue` object of its state."""
    found: dict[str, int] = api.get_state(queue)["queue"]
    return found


def lines(path: Path) -> list[str]:
    """The lines of a file that may not exist yet."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


# -- verbs ---------------------------------------------------------------------------------------


def test_a_job_is_enqueued_worked_off_and_gone(
    topics: Topics, topic: str, api: Api, spawn: Spawn, tmp_path: Path
) -> None:
    data = '{"b":1e400, "a": [1 ,2],\t"a":3, "\\u0061":"\\u00e9é\u2028", "n":-0.0 }'
    refused = topics("enqueue", topic, data)
    assert (refused.code, refused.err.partition(":")[0]) == (1, "topic_not_found")
    first = topics.good("enqueue", topic, data, "--tag", "t", "--key", "k", "--create").value
    again = topics.good("enqueue", topic, data, "--key", "k").value
    assert (first["created"], again["deduped"], again["first_seq"]) == (True, True, 1)
    topics.good("enqueue", topic, "--delay", "100", stdin=b'"later"')
    topics.good("enqueue", topic, "--delay", "600000", "3")
    eventually(lambda: counters(api, topic)["ready"] == 2, "the delay is over", WITHIN_S)
    board = topics.good("queue", topic).value
    assert (board["ready"], board["delayed"], board["in_flight"]) == (2, 1, 0)
    out = tmp_path / "out"
    worker = spawn("work", topic, "--", "sh", "-c", f'cat >>{out}; echo " $TOPICS_JOB_TAG" >>{out}')
    eventually(lambda: len(lines(out)) == 2, "both jobs", WITHIN_S)
    eventually(lambda: api.get_state(topic)["count"] == 1, "only one is left", WITHIN_S)
    worker.terminate()
    assert worker.wait(WITHIN_S) == 0
    assert lines(out) == [f"{data} t", '"later" ']


def test_a_failing_command_is_tried_again_until_the_job_is_dead(
    topics: Topics, topic: str, api: Api, spawn: Spawn, tmp_path: Path
) -> None:
    dead = f"{topic}-dead"
    good(api.put(topic, {"type": "queue", "max_deliveries": 3, "dead_letter": dead}))
    topics.good("enqueue", topic, '"bad"')
    out = tmp_path / "out"
    words = ("--retry-ms", "1", "--", "sh", "-c", f"echo $TOPICS_JOB_DELIVERIES >>{out}; exit 1")
    spawn("work", topic, *words)
    eventually(lambda: counters(api, topic)["dead_lettered"] == 1, "it is dead", WITHIN_S)
    assert lines(out) == ["1", "2", "3"]
    assert api.get_state(topic)["count"] == 0
    assert [record["data"] for record in api.read_all(dead)] == ["bad"]


def test_verbs_refuse_what_is_no_queue(topics: Topics, topic: str, api: Api) -> None:
    good(api.put(topic))
    asked = ("leases", "redrive", "purge")
    for words in (
        ("work", topic, "--", "true"),
        ("queue", topic),
        *(("queue", w, topic) for w in asked),
    ):
        ran = topics(*words)
        assert ran.code == 1
        assert ran.message.startswith("not_a_queue: ")
    ran = topics("work", f"{topic}-absent", "--", "true")
    assert (ran.code, ran.message.partition(":")[0]) == (1, "topic_not_found")


def claim(api: Api, queue: str, node: str, most: int) -> list[int]:
    """Claim jobs for a minute; return their seqs."""
    body = {"node": node, "max": most, "lease_ms": 60_000}
    answer = good(api.http.post(f"/v0/topics/{queue}/claim", json=body))
    return [job["$seq"] for job in answer["claimed"]]


def bury(api: Api, queue: str, count: int) -> None:
    """Wait until this many jobs are dead letters; claims make the server move them."""

    def are_dead() -> bool:
        assert claim(api, queue, "w", 1) == []
        return counters(api, queue)["dead_lettered"] == count

    eventually(are_dead, "they are dead", WITHIN_S)


def kill(api: Api, queue: str, dead: str, *data: str) -> None:
    """Turn jobs of a queue into dead letters."""
    good(api.put(queue, {"type": "queue", "max_deliveries": 1, "dead_letter": dead}))
    for one in data:
        api.add(queue, one, tag=one)
    seqs = claim(api, queue, "w", 100)
    assert len(seqs) == len(data)
    good(api.http.post(f"/v0/topics/{queue}/nack", json={"node": "w", "seqs": seqs, "delay_ms": 0}))
    bury(api, queue, len(data))


def test_redrive_makes_dead_letters_jobs_again(topics: Topics, topic: str, api: Api) -> None:
    dead = f"{topic}-dead"
    kill(api, topic, dead, "a", "b", "c")
    one = topics.good("queue", "redrive", topic, "--tag", "b").value
    assert one == {"topic": topic, "from": dead, "redriven": 1, "skipped": []}
    assert api.get_state(dead)["count"] == 2
    some = topics.good("queue", "redrive", topic, "--max", "1").value
    assert some["redriven"] == 1
    rest = topics.good("queue", "redrive", topic).value
    assert (rest["redriven"], api.get_state(dead)["count"]) == (1, 0)
    assert counters(api, topic)["ready"] == 3
    data = sorted(record["data"] for record in api.read_all(topic))
    assert data == ["a", "b", "c"]
    assert topics.good("queue", "redrive", topic).value["redriven"] == 0


def test_redrive_goes_on_over_many_calls_of_the_server(
    own: MakeServer, tmp_path: Path, topic: str
) -> None:
    server = own({"TOPICS_MAX_CLAIM": "3"})
    api = server.start()
    dead = f"{topic}-dead"
    good(api.put(topic, {"type": "queue", "max_deliveries": 1, "dead_letter": dead}))
    for number in range(10):
        api.add(topic, number)
    for _ in range(4):
        body = {"node": "w", "seqs": claim(api, topic, "w", 3), "delay_ms": 0}
        good(api.http.post(f"/v0/topics/{topic}/nack", json=body))
    bury(api, topic, 10)
    done = Topics(api.url, tmp_path).good("queue", "redrive", topic).value
    assert done["redriven"] == 10
    assert sorted(record["data"] for record in api.read_all(topic)) == list(range(10))


def test_redrive_without_a_dead_letter_topic_is_an_error(topics: Topics, queue: str) -> None:
    ran = topics("queue", "redrive", queue)
    assert ran.code == 1
    assert ran.message.startswith("invalid_request: ")


def test_leases_are_listed(topics: Topics, queue: str, api: Api) -> None:
    api.add(queue, 1, 2)
    assert topics.good("queue", "leases", queue).out == b""
    claim(api, queue, "worker-1", 1)
    (lease,) = topics.good("queue", "leases", queue).lines
    assert (lease["seq"], lease["node"], lease["deliveries"]) == (1, "worker-1", 1)
    head, row = topics.good("queue", "leases", queue, "--table").out.decode().splitlines()
    assert head.split() == ["job", "held", "by", "since", "until", "deliveries"]
    assert row.split()[:2] == ["1", "worker-1"]
    assert " in " in row


def test_purge_deletes_only_waiting_jobs(topics: Topics, queue: str, api: Api) -> None:
    api.add(queue, *range(700))
    claim(api, queue, "w", 2)
    topics.good("enqueue", queue, '"later"', "--delay", "1h")
    assert topics.good("queue", "purge", queue, "--yes").value == {"topic": queue, "deleted": 698}
    found = counters(api, queue)
    assert (found["ready"], found["in_flight"], found["delayed"]) == (0, 2, 1)
    done = topics.good("queue", "purge", queue, "--all", "--yes").value
    assert (done["deleted"], api.get_state(queue)["count"]) == (3, 0)


def test_a_queue_with_the_name_of_a_command_is_shown_by_show(topics: Topics, api: Api) -> None:
    good(api.put("purge", {"type": "queue"}))
    assert topics.good("queue", "show", "purge").value["queue"] == "purge"
    assert topics("queue", "purge").code == 2


def test_the_board_is_live_on_a_terminal(topics: Topics, queue: str, api: Api) -> None:
    ours, theirs = pty.openpty()
    verb = topics.spawn("queue", queue, "--interval", "0.05", stdout=theirs, stdin=theirs)
    os.close(theirs)
    seen = bytearray()

    def collect() -> None:
        try:
            while block := os.read(ours, 65536):
                seen.extend(block)
        except OSError:
            pass  # a terminal whose other end is closed

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        eventually(lambda: b"in flight" in seen, "the board", WITHIN_S)
        api.add(queue, *range(4321))
        eventually(lambda: b"4,321" in seen, "what was added", WITHIN_S)
    finally:
        verb.send_signal(signal.SIGINT)
        assert verb.wait(WITHIN_S) == 0
        thread.join()
        os.close(ours)


# -- workers that end badly ----------------------------------------------------------------------


def test_a_killed_worker_frees_its_jobs_at_once(
    queue: str, api: Api, spawn: Spawn, tmp_path: Path
) -> None:
    api.add(queue, "a")
    out = tmp_path / "out"
    first = spawn("work", queue, *MINUTE, "--", "sh", "-c", f"echo first >>{out}; exec sleep 5")
    eventually(lambda: lines(out) == ["first"], "the first has it", WITHIN_S)
    second = f"echo $TOPICS_JOB_DELIVERIES >>{out}"
    spawn("work", queue, *MINUTE, "--", "sh", "-c", second)
    first.kill()
    eventually(lambda: lines(out) == ["first", "2"], "the second has it", WITHIN_S)
    eventually(lambda: api.get_state(queue)["count"] == 0, "it is done", WITHIN_S)


def test_a_worker_that_was_paused_too_long_does_not_count(
    queue: str, api: Api, spawn: Spawn, tmp_path: Path
) -> None:
    api.add(queue, "a")
    out, go_on = tmp_path / "out", tmp_path / "go-on"
    os.mkfifo(go_on)
    # The worker uses claims; the lease of a push stream would end in the same way, but sooner.
    short = ("--lease-ms", "200", "--poll")
    script = f"echo begun >>{out}; cat {go_on}; echo ended >>{out}"
    first = spawn("work", queue, *short, "--", "sh", "-c", script, stderr=subprocess.PIPE)
    eventually(lambda: lines(out) == ["begun"], "the first has it", WITHIN_S)
    first.send_signal(signal.SIGSTOP)
    second = f"echo $TOPICS_JOB_DELIVERIES >>{out}"
    spawn("work", queue, "--", "sh", "-c", second)
    eventually(lambda: api.get_state(queue)["count"] == 0, "the second did it", WITHIN_S)
    first.send_signal(signal.SIGCONT)
    assert first.stderr is not None
    with first.stderr as errors:
        # The worker ends its command. If the command had ended by itself, the server would have
        # refused its ack.
        assert b"job 1" in errors.readline()
        first.terminate()
        assert errors.read().endswith(b"stopped; 1 lost\n")
    assert first.wait(WITHIN_S) == 0
    assert lines(out) == ["begun", "2"]


def test_sigterm_finishes_the_command_and_leaves_the_rest(
    queue: str, api: Api, spawn: Spawn, tmp_path: Path
) -> None:
    api.add(queue, "a", "b", "c")
    out, go_on = tmp_path / "out", tmp_path / "go-on"
    wait = f"while [ ! -e {go_on} ]; do sleep 0.05; done"
    script = f"echo begun >>{out}; {wait}; echo ended >>{out}"
    worker = spawn("work", queue, *MINUTE, "--", "sh", "-c", script)
    eventually(lambda: lines(out) == ["begun"], "it has one", WITHIN_S)
    worker.terminate()
    go_on.write_text("now")
    assert worker.wait(WITHIN_S) == 0
    # The command may have ended before the worker noticed the signal; then one more command began
    # and ended.
    ended = lines(out).count("ended")
    assert lines(out) == ["begun", "ended"] * ended
    assert 1 <= ended <= 2
    left = 3 - ended
    eventually(lambda: counters(api, queue)["ready"] == left, "all it left is there", WITHIN_S)
    assert api.get_state(queue)["count"] == left


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_a_worker_ends_all_its_command_started_and_frees_the_job(
    number: signal.Signals, queue: str, api: Api, spawn: Spawn, tmp_path: Path
) -> None:
    """The command exits on SIGTERM; its background process ignores that signal."""
    api.add(queue, "a")
    started = tmp_path / "started"
    stubborn = f"trap '' TERM HUP; echo $$ >{started}; while :; do sleep 0.1; done"
    script = f'sh -c "{stubborn.replace("$$", chr(92) + "$$")}" & trap "exit 1" TERM; wait'
    worker = spawn("work", queue, *MINUTE, "--grace-ms", "0", "--", "sh", "-c", script)
    eventually(lambda: len(lines(started)) == 1, "the background process runs", WITHIN_S)
    child = int(lines(started)[0])
    worker.send_signal(number)
    assert worker.wait(WITHIN_S) == 0
    eventually(lambda: not is_alive(child), "the background process has ended", WITHIN_S)
    eventually(lambda: counters(api, queue)["ready"] == 1, "the job is given back", WITHIN_S)


def is_alive(process_id: int) -> bool:
    """Whether a process runs; a zombie does not count."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_workers_and_a_server_that_are_killed(own: MakeServer, tmp_path: Path) -> None:
    """Workers are killed repeatedly and the server twice: none of 120 jobs is missing."""
    server = on_a_port(own)
    topics = Topics(server.api.url, tmp_path)
    good(server.api.put("q", {"type": "queue", "durability": "fsync", "lease_ms": 500}))
    server.api.add("q", *range(120))
    out = tmp_path / "out"
    out.touch()
    words = ("work", "q", "--concurrency", "4", "--", "sh", "-c", f'echo "$(cat)" >>{out}')
    quiet = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    workers = [topics.spawn(*words, **quiet) for _ in range(3)]
    try:
        for kills in range(1, 4):
            eventually(lambda n=kills: len(set(lines(out))) > 25 * n, "they work", WITHIN_S)  # type: ignore[misc]
            workers[0].kill()
            workers[0].wait()
            workers[0] = topics.spawn(*words, **quiet)
            if kills % 2:
                server.crash()
        eventually(lambda: server.api.get_state("q")["count"] == 0, "all is done", 60)
    finally:
        for worker in workers:
            worker.terminate()
        codes = [worker.wait(WITHIN_S) for worker in workers]
    assert codes == [0, 0, 0]
    assert {int(line) for line in lines(out)} == set(range(120))


# -- the library ---------------------------------------------------------------------------------


def test_the_library_from_a_program(queue: str, api: Api) -> None:
    with Queue(queue, url=api.url) as jobs:
        assert jobs.enqueue({"n": 0}, tag="t", key="once").seq == 1
        assert jobs.enqueue({"n": 0}, tag="t", key="once").deduped
        jobs.enqueue_many([NewJob(data={"n": n}) for n in range(1, 50)])
        jobs.enqueue({"n": 50}, delay_ms=100)
        assert (jobs.state().queue.ready, jobs.state().queue.delayed) == (50, 1)
        seen: list[tuple[int, int]] = []

        def handle(job: Job) -> None:
            seen.append((job.data["n"], job.deliveries))
            if job.deliveries == 1 and job.data["n"] == 7:
                raise Retry(after_ms=1)
            if job.deliveries < 3 and job.data["n"] == 8:
                raise ValueError("not yet")

        for push in ("auto", "never"):
            worker = Worker(
                handle, queue, url=api.url, push=push, backoff=Backoff(base_ms=1, cap_ms=5)
            )
            timer = threading.Thread(target=_stop_when_empty, args=(worker, jobs))
            timer.start()
            stats = worker.run()
            timer.join()
            if push == "auto":
                assert stats == Stats(done=51, failed=3)
                assert sorted(seen) == sorted(
                    [*((n, 1) for n in range(51)), (7, 2), (8, 2), (8, 3)]
                )
                jobs.enqueue_many([NewJob(data={"n": n}) for n in range(100, 110)])
            else:
                assert stats == Stats(done=10)


def _stop_when_empty(worker: Worker[None], jobs: Queue) -> None:
    try:
        eventually(lambda: jobs.state().count == 0, "the queue is empty", WITHIN_S)
    finally:
        worker.stop()


def test_a_lease_outlives_its_length_while_the_handler_runs(queue: str, api: Api) -> None:
    api.add(queue, "slow")
    extended = threading.Event()
    deliveries: list[int] = []

    def handle(job: Job) -> None:
        deliveries.append(job.deliveries)
        # The job takes twice its lease, unless the lease is lost; each extension has 0.6 s to
        # arrive on a busy machine.
        assert not job.lost.wait(1.8)
        extended.set()

    for push in ("always", "never"):
        worker = Worker(handle, queue, url=api.url, lease_ms=900, push=push)
        thread = threading.Thread(target=lambda w=worker: extended.wait(WITHIN_S) and w.stop())
        thread.start()
        assert worker.run() == Stats(done=1)
        thread.join()
        extended.clear()
        api.add(queue, "slow")
    assert deliveries == [1, 1]


def test_a_stop_costs_others_one_delivery_for_each_job_it_finished(queue: str, api: Api) -> None:
    """The worker uses a push stream: the server pushes another job for each ack while the stream is
    open.
    """
    api.add(queue, *range(100))
    begun = threading.Barrier(5, timeout=WITHIN_S)

    def handle(job: Job) -> None:
        begun.wait()
        ended.wait(WITHIN_S)

    ended = threading.Event()
    worker = Worker(handle, queue, url=api.url, concurrency=4, push="always")

    def stop() -> None:
        begun.wait()
        worker.stop()
        ended.set()

    thread = threading.Thread(target=stop)
    thread.start()
    stats = worker.run()
    thread.join()
    assert (stats.done, stats.lost) == (4, 0)
    eventually(lambda: counters(api, queue)["ready"] == 96, "the rest is free", WITHIN_S)
    with Queue(queue, url=api.url) as jobs:
        left = jobs.claim("me", max_jobs=100).jobs
    assert len(left) == 96
    assert sum(job.deliveries - 1 for job in left) <= 4


def test_what_is_sent_is_what_a_claim_shows(topics: Topics, queue: str, api: Api) -> None:
    topics.good("enqueue", queue, "[1]", "--meta", '{"trace":"z9"}', "--tag", "t")
    with Queue(queue, url=api.url) as jobs:
        (job,) = jobs.claim("me", lease_ms=60_000).jobs
        assert (job.data, job.meta, job.tag, job.deliveries) == ([1], {"trace": "z9"}, "t", 1)
        held = api.http.get(f"/v0/topics/{queue}/leases").json()
        assert json.dumps(held).count('"me"') == 1
        extended = jobs.extend("me", [job], lease_ms=90_000)
        assert extended.deadlines[job.seq] > job.deadline_ms
        assert jobs.nack("me", [job]).nacked == 1
        (again,) = jobs.claim("me").jobs
        assert jobs.ack("me", [job]).skipped == [job.seq]
        assert jobs.ack("me", [again]).acked == 1
        assert jobs.ack("me", [again]).skipped == [job.seq]
        assert jobs.claim("me", wait_ms=1).jobs == []


@pytest.mark.slow
def test_the_example_of_workers(api: Api, topic: str, tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOPICS_")}
    ours = {"TOPICS_URL": api.url, "QUEUE": topic, "PYTHON": sys.executable}
    env = {**kept, **ours, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)}
    script = ROOT / "examples" / "workers" / "run.sh"
    done = subprocess.run(
        [script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "325 results and 4 dropped jobs of 329" in done.stdout
    assert api.state(topic).status_code == 404
