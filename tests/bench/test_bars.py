"""Cases with bars, against the floor and of queues: their rows, and what their clients refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.bench import Bench, Options
from benchmarks.cases import against_floor, queues
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.clients.queue_wires import Ours, WireError, payload
from benchmarks.clients.workers import Client, Connection, Failed, Turns, calls_of
from benchmarks.report.figures import Figure
from benchmarks.servers.process import Reply
from benchmarks.servers.server import DEFAULT_COMMAND

SEALED_WALK = "diff of 1,000 sealed records walking through 400,000"
SEALED_PAGE = "diff of 1,000 sealed records, one page again and again"


def options(folder: Path, **changed: Any) -> Options:
    """One short round of each side."""
    values: dict[str, Any] = {"rounds": 1, "seconds": 0.02, "quick": False, "records": 1000}
    return Options(folder=folder, command=DEFAULT_COMMAND, **(values | changed))


class Served:
    """Stands for a server: pages of as many records as are asked for, and `unsealed` of them.

    An append is answered with the seqs of all its records but the last `unanswered` ones.
    """

    def __init__(self, unsealed: int = 0, page: int = 1000, unanswered: int = 0) -> None:
        self.calls: list[tuple[str, str]] = []
        self._unsealed = unsealed
        self._page = page
        self._unanswered = unanswered

    def call(self, method: str, path: str, body: bytes = b"") -> Reply:
        self.calls.append((method, path))
        asked = json.loads(body)
        if "records" in asked:
            seqs = list(range(len(asked["records"]) - self._unanswered))
            return Reply(200, (), json.dumps({"seqs": seqs}).encode())
        tail = against_floor.TAIL_RECORDS - asked.get("from_seq", 0)
        count = min(self._page, tail if path.endswith("/bench/diff") else self._page)
        return Reply(200, (), b'{"$seq":1}' * count)

    def expect(self, method: str, path: str, body: bytes = b"") -> bytes:
        self.calls.append((method, path))
        return b'{"unsealed_records":%d}' % self._unsealed

    def stop(self) -> None:
        pass


class Rounds:
    """Stands for `Bench`: each load takes as long as any other, and its requests are kept."""

    def __init__(self, folder: Path, server: Served, **changed: Any) -> None:
        self.options = options(folder, **changed)
        self.server = server
        self.loads: list[tuple[Sequence[bytes], int]] = []

    def start(self, **_: Any) -> Served:
        return self.server

    def start_floor(self, name: str, reply: Reply, *, stores: bool = False) -> Served:
        return self.server

    def requests(self, name: str, requests: Sequence[bytes]) -> Sequence[bytes]:
        return requests

    def fill(self, server: Served, requests: Sequence[bytes], count: int, connections: int) -> None:
        pass

    def load(
        self, server: Served, requests: Sequence[bytes], *, connections: int, seconds: float = 1
    ) -> Sample:
        self.loads.append((requests, connections))
        return Sample(1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)

    def interleave(self, sides: Mapping[str, Callable[[], Sample]]) -> dict[str, list[Sample]]:
        return {name: [side()] for name, side in sides.items()}


def bars(figures: Sequence[Figure]) -> dict[str, float | None]:
    """The least value of each row."""
    found = {}
    for figure in figures:
        assert figure.bar is None or figure.bar.sense == ">="
        found[figure.name] = None if figure.bar is None else figure.bar.limit
    assert len(found) == len(figures)
    return found


def by_connections(what: str, one: float | None, many: float | None) -> dict[str, float | None]:
    """The rows of one kind of request."""
    return {f"{what}, 1 connection": one, f"{what}, 16 connections": many}


# -- against the floor ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (against_floor.append_1, by_connections("append of one record", 0.75, 0.6)),
        (against_floor.append_100, by_connections("append of 100 records", 0.45, 0.25)),
        (
            against_floor.diff_1000,
            by_connections("diff of 1,000 records", 0.8, 0.8),
        ),
        (
            against_floor.diff_sealed,
            by_connections(SEALED_WALK, 0.25, 0.25) | by_connections(SEALED_PAGE, 0.25, 0.25),
        ),
    ],
)
def test_each_number_of_connections_has_its_bar(
    case: Callable[[Bench], list[Figure]], rows: dict[str, float], tmp_path: Path
) -> None:
    assert bars(case(cast(Bench, Rounds(tmp_path, Served())))) == rows


def test_the_tail_read_has_a_bar_and_the_one_that_would_wait_is_stated(tmp_path: Path) -> None:
    bench = Rounds(tmp_path, Served())
    waits = "tail read with wait_ms, the record is there"
    rows = by_connections("tail read", 0.8, 0.8) | by_connections(waits, None, None)
    assert bars(against_floor.tail_read(cast(Bench, bench))) == rows
    (plain,), (waiting,) = bench.loads[0][0], bench.loads[-1][0]
    asked = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in (plain, waiting)]
    assert [each["from_seq"] for each in asked] == [against_floor.TAIL_RECORDS - 1] * 2
    assert "wait_ms" not in asked[0]
    assert asked[1]["wait_ms"] > 0


def test_sealed_pages_are_walked_one_after_the_other_and_read_again(tmp_path: Path) -> None:
    bench = Rounds(tmp_path, Served())
    against_floor.diff_sealed(cast(Bench, bench))
    starts = [
        [json.loads(request.partition(b"\r\n\r\n")[2])["from_seq"] for request in requests]
        for requests, _ in bench.loads
    ]
    # Two sides each, with 1 and with 16 connections.
    assert starts == [list(range(0, 400_000, 1000))] * 4 + [[200_000]] * 4


def test_records_are_sealed_before_they_are_read(tmp_path: Path) -> None:
    server = Served()
    against_floor.diff_sealed(cast(Bench, Rounds(tmp_path, server)))
    paths = [path for _, path in server.calls]
    assert paths.index("/v0/admin/seal") < paths.index("/v0/topics/walk/diff")


def test_records_that_are_not_sealed_fail_the_case(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="3 records of walk are not sealed"):
        against_floor.diff_sealed(cast(Bench, Rounds(tmp_path, Served(unsealed=3))))


def test_a_page_of_fewer_records_fails_the_case(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="gave 999 records instead of 1000"):
        against_floor.diff_1000(cast(Bench, Rounds(tmp_path, Served(page=999))))


@pytest.mark.parametrize("case", [against_floor.append_1, against_floor.append_100])
def test_an_answer_without_all_seqs_fails_the_case(
    case: Callable[[Bench], list[Figure]], tmp_path: Path
) -> None:
    with pytest.raises(BenchmarkError, match=r"an append of (1 has 0|100 has 99) seqs"):
        case(cast(Bench, Rounds(tmp_path, Served(unanswered=1))))


def test_a_steady_run_has_one_connection(tmp_path: Path) -> None:
    figures = against_floor.diff_1000(cast(Bench, Rounds(tmp_path, Served(), steady=True)))
    assert [figure.name for figure in figures] == ["diff of 1,000 records, 1 connection"]


# -- rounds of queues ----------------------------------------------------------------------------


def claimed(numbers: Sequence[int], acked: int | None = None) -> bytes:
    """The answer to a claim of these jobs."""
    jobs = b",".join(
        b'{"$seq":%d,"lease_id":"lease_%x","data":%b}' % (n, n, payload(n)) for n in numbers
    )
    done = b"" if acked is None else b',"ack":{"acked":%d,"skipped":[]}' % acked
    return answer(b'{"claimed":[%b],"count":%d,"ready":0%b}' % (jobs, len(numbers), done))


def answer(body: bytes) -> bytes:
    """An HTTP answer."""
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def turns(claims: int, *, joined: bool) -> tuple[Turns, Connection]:
    """A worker that claims so often, two jobs at a time."""
    worker = cast(Connection, SimpleNamespace(number=0, data=b""))
    return Turns([worker], [claims], Ours(), 2, joined=joined), worker


def sent(phase: Turns, worker: Connection) -> list[tuple[str, list[int]]]:
    """Each request until the last: its verb, and the jobs that it completes."""
    found: list[tuple[str, list[int]]] = []
    number = 0
    while request := phase._next(worker):
        head, _, body = request.partition(b"\r\n\r\n")
        asked = json.loads(body)
        verb = head.split(b" ")[1].rpartition(b"/")[2].decode()
        done = asked if verb == "ack" else asked.get("ack", {"seqs": []})
        found.append((verb, done["seqs"]))
        acked = len(done["seqs"]) or None
        if verb == "claim":
            worker.data = claimed([number, number + 1], acked)
            number += 2
        else:
            worker.data = answer(b'{"acked":2,"skipped":[]}')
        assert phase._has_whole(worker)
        assert not phase._has_whole(cast(Connection, SimpleNamespace(number=0, data=b"HTTP/1.1 ")))
    return found


def test_two_requests_a_round_are_a_claim_and_its_ack() -> None:
    phase, worker = turns(2, joined=False)
    expected = [("claim", []), ("ack", [0, 1]), ("claim", []), ("ack", [2, 3])]
    assert sent(phase, worker) == expected


def test_one_request_a_round_completes_the_jobs_before_and_claims_the_next() -> None:
    phase, worker = turns(3, joined=True)
    expected = [("claim", []), ("claim", [0, 1]), ("claim", [2, 3]), ("ack", [4, 5])]
    assert sent(phase, worker) == expected


def test_a_worker_without_claims_sends_nothing() -> None:
    phase, worker = turns(0, joined=True)
    assert phase._next(worker) == b""


@pytest.mark.parametrize("data", [claimed([2, 3]), claimed([2, 3], 1), claimed([2], 2)])
def test_a_joined_claim_whose_answer_lacks_jobs_or_acks_is_an_error(data: bytes) -> None:
    phase, worker = turns(2, joined=True)
    phase._next(worker)
    worker.data = claimed([0, 1])
    phase._next(worker)
    worker.data = data
    with pytest.raises(WireError):
        phase._has_whole(worker)


@pytest.mark.parametrize("got", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4]])
def test_jobs_that_are_missing_or_come_twice_fail_the_round(got: Sequence[int]) -> None:
    client = Client()
    client._enqueues({"workers": 1, "batch": 2, "jobs": 4}, Ours(), [])
    client._check(4, [(0, claimed([0, 1])), (0, claimed([2, 3]))])
    with pytest.raises(Failed, match="4 jobs enqueued"):
        client._check(4, [(0, claimed(got))])


def test_the_claims_of_a_round_are_shared_by_the_workers() -> None:
    assert calls_of({"workers": 3, "batch": 8, "jobs": 64}) == [3, 3, 2]


def test_rounds_of_a_real_queue_have_bars_for_16_workers(tmp_path: Path) -> None:
    with Bench(options(tmp_path), []) as bench:
        figures = queues.queue_rounds(bench)
    two, one = queues.ROUND_LIMITS
    assert bars(figures) == {
        f"{two}, 1 worker, 8 a call": None,
        f"{one}, 1 worker, 8 a call": None,
        f"{two}, 16 workers, 8 a call": 30_000,
        f"{one}, 16 workers, 8 a call": 45_000,
    }
    assert all(figure.judged.unit == "jobs/s" for figure in figures)
    assert all(figure.judged.median > 0 for figure in figures)
