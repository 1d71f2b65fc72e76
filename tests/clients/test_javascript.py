"""The JavaScript client in Node: its own tests with a faked server, real servers, and its package.

`tests/browser/test_javascript_client.py` runs it in Chromium; `tests/cli/docs` runs its README.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.driver import ROOT, Server, eventually, good
from tests.ports import lasting_port
from tests.streams import node

CLIENT: Final = ROOT / "clients" / "js"
HERE: Final = ROOT / "tests" / "clients"
WITHIN_S: Final = 60.0


@pytest.fixture(scope="session")
def found_node() -> node.Node:
    """The path of a Node that is recent enough."""
    try:
        return node.find()
    except node.Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A running server that restarts on the same port."""
    made = Server(tmp_path / "server", {"TOPICS_PORT": str(lasting_port())})
    made.start()
    yield made
    made.stop()


class Follower:
    """A Node that runs `follow.mjs`; `items` are those that it printed."""

    def __init__(self, found: node.Node, url: str, topic: str, cursor: Path) -> None:
        words = [found.path, str(HERE / "follow.mjs"), url, topic, str(cursor)]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=found.environment()
        )
        self.items: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.items.append(json.loads(line))

    def wait_for(self, count: int) -> None:
        """Wait until so many items were printed."""
        eventually(lambda: len(self.items) >= count, f"{count} items", WITHIN_S)

    def end(self) -> int:
        """Wait for the end of the program."""
        try:
            return self.process.wait(WITHIN_S)
        finally:
            self.close()

    def close(self) -> None:
        """End the program if it still runs, and read its output."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def following(found: node.Node, server: Server, cursor: Path) -> Iterator[Follower]:
    """A follower of the topic `events`."""
    follower = Follower(found, server.api.url, "events", cursor)
    try:
        yield follower
    finally:
        follower.close()


def printed(found: node.Node, script: str, *words: str) -> Any:
    """The JSON that a script of this folder prints."""
    done = subprocess.run(
        [found.path, str(HERE / script), *words],
        env=found.environment(),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_with_a_faked_server(found_node: node.Node) -> None:
    file = HERE / "faked.test.mjs"
    done = subprocess.run(
        [found_node.path, "--test", "--test-reporter=tap", str(file)],
        env=found_node.environment(),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    written = len(re.findall(r"^test\(", file.read_text(), re.MULTILINE))
    assert f"# pass {written}\n" in done.stdout
    assert written >= 18


def test_a_follower_gets_every_record_once_over_kills_and_restarts(
    found_node: node.Node, server: Server, tmp_path: Path
) -> None:
    good(server.api.append("events", [{"data": n} for n in range(500)]))
    with following(found_node, server, tmp_path / "cursor") as follower:
        for turn in range(4):
            follower.wait_for(500 + 100 * turn)
            if turn % 2:
                server.restart()
            else:
                server.crash()
            good(server.api.append("events", [{"data": n} for n in range(100)]))
        follower.wait_for(900)
        good(server.api.append("events", [{"data": None, "tag": "last"}]))
        assert follower.end() == 0
        assert [item["seq"] for item in follower.items] == list(range(1, 902))
        assert {item["kind"] for item in follower.items} == {"record"}


def test_a_program_goes_on_from_its_file_and_is_told_of_a_gap(
    found_node: node.Node, server: Server, tmp_path: Path
) -> None:
    good(server.api.put("events", {"cap_records": 50}))
    good(server.api.append("events", [{"data": n} for n in range(20)]))
    with following(found_node, server, tmp_path / "cursor") as follower:
        follower.wait_for(20)
        eventually((tmp_path / "cursor").exists, "the cursor is kept")
        follower.process.kill()
        assert follower.end() != 0
        assert [item["seq"] for item in follower.items] == list(range(1, 21))
    for _ in range(3):
        good(server.api.append("events", [{"data": n} for n in range(99)]))
    good(server.api.append("events", [{"data": None, "tag": "last"}]))
    earliest = server.api.get_state("events")["earliest_seq"]
    with following(found_node, server, tmp_path / "cursor") as follower:
        assert follower.end() == 0
        gap, *records = follower.items
        assert gap["kind"] == "gap"
        assert gap["reason"] == "from_seq_too_old"
        # The program may have been killed before it kept its last cursor.
        assert gap["from"] in (20, 21)
        assert gap["to"] == earliest - 1
        assert [item["seq"] for item in records] == list(range(earliest, 319))


def test_reading_appending_and_cursors(found_node: node.Node, server: Server) -> None:
    assert printed(found_node, "reading.mjs", server.api.url) == [
        *(False, True),
        *(701, 332, {"n": 332}, "even"),
        *(334, 334),
        350,
        *("condition_failed", 1),
        *(["recreated", 1], ["recreated", 1]),
        *(True, "topic_not_found"),
    ]


def test_shared_without_locks_follows_by_its_own_connection(
    found_node: node.Node, server: Server
) -> None:
    seen = printed(found_node, "shared.mjs", server.api.url)
    assert [each for each in seen if each != "caught-up"] == [1, 2, 3]


def test_the_package_holds_the_client_and_is_installed(
    found_node: node.Node, tmp_path: Path
) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    described = json.loads((CLIENT / "package.json").read_text())
    assert described["version"] == version
    assert "dependencies" not in described
    assert (CLIENT / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()

    def npm(*words: str) -> str:
        done = subprocess.run(
            [*found_node.npm, *words],
            cwd=tmp_path,
            env=found_node.environment(),
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    [packed] = json.loads(npm("pack", "--json", str(CLIENT)))
    assert {file["path"] for file in packed["files"]} == {
        *("topics.js", "topics.d.ts", "README.md", "LICENSE", "package.json")
    }
    npm("install", "--offline", "--no-audit", "--no-fund", packed["filename"])
    (tmp_path / "program.mjs").write_text(
        'import * as client from "topics-client"; console.log(Object.keys(client).join(" "));'
    )
    done = subprocess.run(
        [found_node.path, "program.mjs"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    exported = set(done.stdout.split())
    types = (CLIENT / "topics.d.ts").read_text()
    assert exported == {"Refused", "Topics", "Unreachable", "fileStore", "webStore"}
    assert exported == set(re.findall(r"^export (?:class|function) (\w+)", types, re.MULTILINE))


def test_the_types_name_every_option() -> None:
    """An option that the client checks has a line in the types, and the other way round."""
    code = (CLIENT / "topics.js").read_text()
    types = (CLIENT / "topics.d.ts").read_text()

    def members(name: str) -> set[str]:
        match = re.search(
            rf"interface {name}(?: extends (\w+))? \{{\n(.*?)^\}}", types, re.S | re.M
        )
        assert match is not None, name
        own = set(re.findall(r"^  (\w+)\??:", match[2], re.MULTILINE))
        return own | (members(match[1]) if match[1] else set())

    common = set(re.findall(r'"(\w+)"', re.findall(r"^const COMMON = \[(.*)\];", code, re.M)[0]))
    for call, interface in (
        ("Topics", "TopicsOptions"),
        ("append", "AppendOptions"),
        ("read", "ReadOptions"),
        ("live", "LiveOptions"),
    ):
        [listed] = re.findall(rf'checkKeys\(options, \[(.*)\], "{call}"\);', code)
        known = set(re.findall(r'"(\w+)"', listed)) | (common if "COMMON" in listed else set())
        assert members(interface) == known, call
