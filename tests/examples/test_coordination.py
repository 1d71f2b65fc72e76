"""`examples/coordination`: races of real processes; exactly one wins each time.

A usual run has few rounds; `./run test-crash` runs `--rounds` of them (200).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.driver import ROOT, Api, Server, eventually
from tests.ports import lasting_port

EXAMPLES: Final = ROOT / "examples" / "coordination"
RACERS: Final = 8
EVERYDAY: Final = 25
LONG_AGO_MS: Final = 1_000


class Racers:
    """Eight processes of one example that start at the same time on command."""

    def __init__(self, example: str, function: str, url: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("TOPICS_")}
        env["PYTHONPATH"] = str(ROOT / "src")
        racer = Path(__file__).parent / "racer.py"
        self.names = [f"racer-{number}" for number in range(RACERS)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(racer), str(EXAMPLES / example), function, url, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
            )
            for name in self.names
        ]
        for process in self._processes:
            assert self._line(process) == b"ready\n"

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        return process.stdout.readline()

    def race(self, *words: object) -> dict[str, Any]:
        """The result of each process, by its name."""
        line = json.dumps(words).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return {
            name: json.loads(self._line(process))
            for name, process in zip(self.names, self._processes, strict=True)
        }

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            with process:
                assert process.stdin is not None
                process.stdin.close()


Race = Callable[[str, str, str], Racers]


@pytest.fixture
def race() -> Iterator[Race]:
    racers: list[Racers] = []

    def start(example: str, function: str, url: str) -> Racers:
        racers.append(Racers(example, function, url))
        return racers[-1]

    yield start
    for racer in racers:
        racer.close()


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The URL of the streams."""
    server = Server(tmp_path_factory.mktemp("coordination"))
    yield server.start()
    server.stop()


@pytest.fixture(
    params=[
        pytest.param("everyday", id="everyday"),
        pytest.param(
            "full", marks=[pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(0)], id="full"
        ),
    ]
)
def rounds(request: pytest.FixtureRequest) -> int:
    """The number of races."""
    if request.param == "everyday":
        return EVERYDAY
    return int(request.config.getoption("--rounds", default=200))


@pytest.fixture
def url(door: Api, request: pytest.FixtureRequest) -> str:
    """A stream for this test alone."""
    return f"{door.url}/v1/stream/race/{abs(hash((request.node.nodeid, time.time_ns()))):x}"


def messages(url: str, door: Api) -> list[dict[str, Any]]:
    """All messages of a stream."""
    found: list[dict[str, Any]] = []
    offset = "-1"
    while True:
        answer = door.http.get(url, params={"offset": offset})
        assert answer.status_code == 200, answer.text
        found += answer.json()
        offset = answer.headers["Stream-Next-Offset"]
        if answer.headers.get("Stream-Up-To-Date") == "true":
            return found


def winner(told: dict[str, Any], won: str) -> str:
    """The winner; there must be exactly one."""
    (found,) = (name for name, answer in told.items() if answer[won])
    return found


def test_a_task_is_claimed_by_one(door: Api, url: str, race: Race, rounds: int) -> None:
    racers = race("claim.py", "claim", url)
    owners = {}
    for number in range(rounds):
        told = racers.race(f"t{number}")
        owners[f"t{number}"] = owner = winner(told, "won")
        statuses = Counter(answer["status"] for answer in told.values())
        assert statuses == {200: 1, 204: RACERS - 1}
        assert {answer["owner"] for answer in told.values()} == {owner}
    stored = messages(url, door)
    assert [(message["task"], message["owner"]) for message in stored] == list(owners.items())


def test_no_change_of_a_counter_is_lost(door: Api, url: str, race: Race, rounds: int) -> None:
    racers = race("counter.py", "add", url)
    told: dict[int, Counter[int]] = {}
    for _ in range(rounds):
        for answer in racers.race("n").values():
            for version, status in answer["tries"]:
                told.setdefault(version, Counter())[status] += 1
    stored = messages(url, door)
    assert [message["version"] for message in stored] == list(range(RACERS * rounds))
    assert stored[-1]["value"] == RACERS * rounds
    for version in range(RACERS * rounds):
        assert told[version][200] == 1, f"one wrote version {version}"
        assert set(told[version]) <= {200, 204}
    if rounds > EVERYDAY:
        assert sum(counts[204] for counts in told.values()) > 0, "they raced"


def _append(door: Api, url: str, producer: str, epoch: int, seq: int, value: object) -> Any:
    headers = {"Producer-Id": producer, "Producer-Epoch": str(epoch), "Producer-Seq": str(seq)}
    return door.http.post(url, json=value, headers=headers)


def test_an_old_claim_is_taken_over_by_one_and_the_zombie_is_fenced(
    door: Api, url: str, race: Race, rounds: int
) -> None:
    racers = race("takeover.py", "take", url)
    tried = 0
    for number in range(rounds):
        task = f"t{number}"
        claim = {"kind": "claim", "task": task, "owner": "zombie", "epoch": 0}
        stored = _append(door, url, f"task:{task}", 0, 0, {**claim, "at_ms": LONG_AGO_MS})
        assert stored.status_code == 200
        told = racers.race(task)
        owner = winner(told, "won")
        statuses = Counter(answer["status"] for answer in told.values())
        assert statuses[200] == 1
        # None means that the process saw the winner's claim before it tried.
        assert set(statuses) <= {200, 204, None}
        tried += statuses[204]
        assert {(a["owner"], a["epoch"]) for a in told.values()} == {(owner, 1)}
        late = _append(door, url, f"task:{task}", 0, 1, {"kind": "report", "task": task})
        assert (late.status_code, late.headers["Producer-Epoch"]) == (403, "1")
    if rounds > EVERYDAY:
        assert tried > 0, "they raced"
    assert len(messages(url, door)) == 2 * rounds


def test_a_term_has_one_leader_and_the_last_one_is_fenced(
    door: Api, url: str, race: Race, rounds: int
) -> None:
    racers = race("leader.py", "lead", url)
    for epoch in range(rounds):
        told = racers.race(epoch)
        leader = winner(told, "leads")
        statuses = Counter(answer["status"] for answer in told.values())
        assert statuses == {200: 1, 204: RACERS - 1}
        assert {answer["leader"] for answer in told.values()} == {leader}
        order = {"epoch": epoch, "leader": leader, "says": "go"}
        assert _append(door, url, "leader", epoch, 1, order).status_code == 200
        gap = _append(door, url, "leader", epoch, 3, order)
        assert (gap.status_code, gap.headers["Producer-Expected-Seq"]) == (409, "2")
        if epoch:
            late = _append(door, url, "leader", epoch - 1, 2, {**order, "epoch": epoch - 1})
            assert (late.status_code, late.headers["Producer-Epoch"]) == (403, str(epoch))
    assert [m["epoch"] for m in messages(url, door)] == [e // 2 for e in range(2 * rounds)]


def _tokens(url: str, text: bytes, pause_s: float) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "tokens.py"), url, "--pause", str(pause_s)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
    )
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()
    return process


def test_words_continue_over_kills_of_every_process(tmp_path: Path) -> None:
    text = "  Wörter, die kommen und gehen.\n" * 20 + "Ende\n\n"
    server = Server(tmp_path, {"TOPICS_PORT": str(lasting_port())})
    try:
        api = server.start()
        url = f"{api.url}/v1/stream/answers/1"
        for life in range(3):
            process = _tokens(url, text.encode(), 0.01)
            with process:

                def has_some(least: int = (life + 1) * 300) -> bool:
                    answer = server.api.http.get(url, params={"offset": "-1"})
                    return answer.status_code == 200 and len(answer.content) >= min(least, 600)

                eventually(has_some, "some words", 60.0)
                if life == 0:
                    process.kill()
                elif life == 1:
                    server.crash()
                    assert process.wait(60) == 0
                else:
                    assert process.wait(60) == 1, "it is complete"
                    assert process.stderr is not None
                    assert b"complete" in process.stderr.read()
        whole = server.api.http.get(url, params={"offset": "-1"})
        assert whole.content.decode() == text
        assert whole.headers["Stream-Closed"] == "true"
    finally:
        server.stop()
