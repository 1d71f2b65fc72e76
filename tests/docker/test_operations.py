"""Follows docs/OPERATIONS.md: the systemd unit, and a copied directory."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.contract.driver import ROOT, Server, eventually
from tests.docker import sandbox
from topics_server.settings import Settings, variable

UNIT: Final = ROOT / "docker" / "systemd" / "topics-server.service"


def pairs() -> list[tuple[str, str]]:
    lines = [line for line in UNIT.read_text().splitlines() if line and line[0] not in "#["]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


def test_the_unit_names_settings_and_verbs_that_exist() -> None:
    known = {variable(name) for name in Settings.model_fields}
    given = {value.partition("=")[0] for name, value in pairs() if name == "Environment"}
    assert given
    assert given <= known
    unit = dict(pairs())
    assert unit["ExecStart"].split()[1:] == ["serve"]
    assert "-HUP $MAINPID" in unit["ExecReload"]
    assert unit["KillSignal"] == "SIGTERM"
    grace_s = Settings.model_fields["shutdown_grace_ms"].default / 1000
    assert int(unit["TimeoutStopSec"]) >= 3 * grace_s


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DynamicUser", "yes"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("UMask", "0077"),
    ],
)
def test_the_unit_is_sandboxed(name: str, value: str) -> None:
    assert (name, value) in pairs()


def test_the_unit_is_understood() -> None:
    """If systemd is installed, it checks the unit itself; otherwise the test checks the form of
    each line.
    """
    for line in UNIT.read_text().splitlines():
        assert not line or re.match(r"#|\[(Unit|Service|Install)\]$|[A-Z][A-Za-z]+=", line), line
    program = shutil.which("systemd-analyze")
    if program is None:
        return
    done = subprocess.run(
        [program, "verify", str(UNIT)], capture_output=True, text=True, timeout=60, check=False
    )
    # The program that it starts is not installed here; there must be no other complaint about our
    # unit.
    told = [line for line in done.stderr.splitlines() if "topics-server.service" in line]
    assert [line for line in told if "is not executable" not in line] == []


@pytest.mark.skipif(not sandbox.is_available(), reason=sandbox.INSTALL)
def test_the_server_works_under_the_units_own_system_calls(tmp_path: Path) -> None:
    """The server starts, appends, seals, reads, takes a snapshot and stops under the filter of the
    shipped unit.
    """
    command = (sys.executable, sandbox.__file__, str(UNIT), sys.executable, "-m", "topics_server")
    env = {"TOPICS_SEGMENT_MAX_EVENTS": "10", "TOPICS_COLD_DIR": str(tmp_path / "cold")}
    server = Server(tmp_path / "one", env, command=(*command, "serve"))
    api = server.start()
    for number in range(40):
        api.add("events", {"n": number})
    api.http.post("/v0/admin/seal")
    eventually(lambda: any(server.data_dir.rglob("*.data")), "segments are written", 30)
    expected = api.read_all("events")
    assert len(expected) == 40
    assert server.crash().read_all("events") == expected
    server.stop()


@pytest.mark.skipif(not sandbox.is_available(), reason=sandbox.INSTALL)
def test_a_call_that_the_unit_does_not_list_is_noticed(tmp_path: Path) -> None:
    """The unit without `mbind`, which importing numpy calls, ends the server with SIGSYS."""
    unit = tmp_path / "without.service"
    unit.write_text(UNIT.read_text().replace(" mbind\n", "\n"))
    assert unit.read_text() != UNIT.read_text()
    command = [sys.executable, sandbox.__file__, str(unit), sys.executable, "-c", "import numpy"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGSYS


def test_a_copy_of_a_stopped_directory_is_the_same_store(tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    env = {
        "TOPICS_COLD_DIR": str(cold),
        "TOPICS_SEGMENT_MAX_EVENTS": "10",
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
        "TOPICS_WAL_SHARDS": "2",
    }
    server = Server(tmp_path / "one", env)
    api = server.start()
    api.put("jobs", {"type": "queue"})
    for number in range(60):
        api.add("events", {"n": number}, tag=f"t{number % 3}")
        api.add("jobs", number)
    api.delete("events", match="t1")
    eventually(lambda: any(cold.rglob("*.data")), "segments are in the cold folder", 30)
    expected = api.read_all("events", include_tags=True)
    heads = {name: api.get_state(name)["head_seq"] for name in ("events", "jobs")}
    server.stop()

    other = tmp_path / "two"
    subprocess.run(["cp", "-a", str(server.directory), str(other)], check=True)
    subprocess.run(["cp", "-a", str(cold), str(tmp_path / "cold-two")], check=True)
    copy = Server(other, env | {"TOPICS_COLD_DIR": str(tmp_path / "cold-two")})
    verify = [sys.executable, "-m", "topics_server", "verify", str(copy.data_dir)]
    done = subprocess.run(
        [*verify, "--cold-dir", str(tmp_path / "cold-two")],
        env=copy.environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    shutil.rmtree(server.directory)
    shutil.rmtree(cold)
    api = copy.start()
    assert api.read_all("events", include_tags=True) == expected
    assert {name: api.get_state(name)["head_seq"] for name in heads} == heads
    assert api.add("events", "next")["seqs"] == [heads["events"] + 1]
    copy.stop()


def test_the_operations_document_says_how_to_be_safe() -> None:
    """Contract §12 [12-05]"""
    said = " ".join((ROOT / "docs" / "OPERATIONS.md").read_text().split())
    for word in (
        "put TLS in front",
        "the fewest scopes and prefixes it needs",
        "never set `TOPICS_ALLOW_INSECURE_NO_AUTH` outside a private network",
        "Caps (`TOPICS_MAX_*`)",
        "every payload in the clear",
    ):
        assert word in said, word
