"""`examples/mirror` keeps one topic equal on two real servers, although the test kills all
processes in turn.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import MakeServer
from tests.contract.driver import ROOT, Api, Server, eventually, good

WITHIN_S = 30.0
SITES = ("east", "west")


class Mirror:
    """The script between two servers; tests may kill and restart it."""

    def __init__(self, servers: dict[str, Server], folder: Path) -> None:
        self.servers = servers
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the script."""
        script = ROOT / "examples" / "mirror" / "mirror.py"
        ends = [f"{site}={server.api.url}" for site, server in self.servers.items()]
        words = [sys.executable, str(script), "orders", str(self.folder / "state"), *ends]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with (self.folder / "mirror.log").open("ab") as log:
            self.process = subprocess.Popen(words, env=env, stderr=log)

    def kill(self) -> None:
        """Kill the script with SIGKILL."""
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "mirror.log").read_text()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None


@pytest.fixture
def mirror(own: MakeServer, tmp_path: Path) -> Iterator[Mirror]:
    servers = {site: own({}) for site in SITES}
    for server in servers.values():
        server.start()
    found = Mirror(servers, tmp_path)
    yield found
    if found.process is not None:
        found.kill()


def data(api: Api, **asked: Any) -> list[Any]:
    if api.state("orders").status_code == 404:
        return []
    return [record["data"] for record in api.read_all("orders", **asked)]


def both(mirror: Mirror, count: int) -> None:
    """Wait until both sides have this many records."""
    for site, server in mirror.servers.items():
        api = server.api
        eventually(
            lambda api=api: len(data(api)) >= count,  # type: ignore[misc]
            f"{count} at {site}: {(mirror.folder / 'mirror.log').read_text()}",
            WITHIN_S,
        )


def test_both_sides_come_to_hold_the_same_records(mirror: Mirror) -> None:
    east, west = (server.api for server in mirror.servers.values())
    mirror.start()
    body = (
        b'{"records":[{"data":{ "n":1e400,"a":1,"a":2 },"tag":"t","node":"east","meta":{"k" : 1}}]}'
    )
    media = {"content-type": "application/json"}
    good(east.http.post("/v0/topics/orders", content=body, headers=media))
    east.add("orders", "of nobody")
    west.add("orders", "of west", node="west")
    both(mirror, 3)
    for api in (east, west):
        found = api.diff("orders", include_tags=True)
        assert b'"data":{ "n":1e400,"a":1,"a":2 },"meta":{"k" : 1}' in found.content
        nodes = {str(record["data"]): record.get("$node") for record in found.json()["records"]}
        assert nodes.pop("of west") == "west"
        assert len(nodes) == 2
        assert api.diff("orders", node="west").json()["head_seq"] == 3
    # A site that excludes its own node sees the other site's records.
    assert data(west, node="west")[-1] == "of nobody"
    assert sorted(data(east, node="east")) == ["of nobody", "of west"]
    assert west.read_all("orders", node="west")[-1]["$node"] == "east"


def test_kills_of_every_process_lose_and_double_nothing(mirror: Mirror) -> None:
    wanted: dict[str, list[str]] = {site: [] for site in SITES}

    def write(count: int) -> None:
        for number in range(count):
            for site, server in mirror.servers.items():
                name = f"{site} {len(wanted[site])}"
                node = {"node": site} if number % 2 else {}
                server.api.add("orders", name, **node)
                wanted[site].append(name)

    def twice() -> None:
        mirror.kill()
        mirror.start()
        mirror.kill()

    steps: list[Callable[[], object]] = [
        lambda: None,
        mirror.kill,
        twice,
        lambda: mirror.servers["west"].signal(signal.SIGKILL),
        mirror.kill,
    ]
    mirror.start()
    for step in steps:
        write(40)
        step()
        west = mirror.servers["west"]
        if west.process is None:
            # The server restarts on its old port, because the mirror uses its address.
            port = west.api.url.rpartition(":")[2]
            west.env = {**west.env, "TOPICS_PORT": port}
            west.start()
        write(40)
        if mirror.process is None:
            mirror.start()
    count = sum(map(len, wanted.values()))
    both(mirror, count)
    # The test ends when the last record of each site is on both sites.
    write(1)
    both(mirror, count + 2)
    for server in mirror.servers.values():
        found = data(server.api)
        assert len(found) == count + 2
        for site in SITES:
            assert [name for name in found if name.startswith(site)] == wanted[site]
