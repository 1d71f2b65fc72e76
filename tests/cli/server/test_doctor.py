"""`topics doctor` and `topics health` as an operator runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Topics
from tests.contract.driver import Api, Server, eventually
from topics_server.cli.server import doctor
from topics_server.cli.server.doctor import FAIL, OK, WARN


def verdicts(lines: list[Any]) -> dict[str, str]:
    return {line["check"]: line["verdict"] for line in lines}


def test_a_sound_machine_has_no_failure_and_nothing_is_left_behind(
    alone: Topics, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    alone.env = {"TOPICS_URL": "", "TOPICS_DATA_DIR": str(data), "TOPICS_MIN_FREE_BYTES": "0"}
    ran = alone("doctor", "--json")
    found = verdicts(ran.lines)
    assert set(found) >= {
        "bind",
        "open files",
        "data directory",
        "data disk space",
        "sync",
        "clock",
    }
    assert ran.code == (1 if FAIL in found.values() else 0)
    assert found["bind"] == found["data directory"] == found["clock"] == OK
    assert list(data.iterdir()) == []


def test_what_is_wrong_is_told_with_what_to_do(alone: Topics, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)
    alone.env = {
        "TOPICS_HOST": "0.0.0.0",
        "TOPICS_DATA_DIR": str(data),
        "TOPICS_MIN_FREE_BYTES": str(2**60),
    }
    ran = alone("doctor", "--json")
    assert ran.code == 1
    found = verdicts(ran.lines)
    assert found["bind"] == FAIL
    assert found["data disk space"] == FAIL
    assert found["data directory"] == WARN
    assert found["server"] == FAIL
    assert all(line["advice"] for line in ran.lines if line["verdict"] != OK)
    shown = alone("doctor", "--table").out.decode()
    assert "chmod 0700" in shown


def test_a_running_server_is_asked(topics: Topics, api: Api) -> None:
    found = verdicts(topics("doctor", "--json").lines)
    assert found["server"] == found["ready"] == OK


def test_a_file_where_the_directory_should_be(alone: Topics, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    alone.env = {"TOPICS_DATA_DIR": str(tmp_path / "file")}
    ran = alone("doctor", "--json")
    assert verdicts(ran.lines)["data directory"] == FAIL


def test_the_file_system_is_named() -> None:
    assert doctor.kind_of(Path("/proc")) == "proc"


def test_health_says_by_its_exit_code(topics: Topics, alone: Topics) -> None:
    assert topics.good("health").value["status"] == "ok"
    assert topics.good("health", "--ready").value["status"] == "ready"
    assert alone("health").code == 2


def test_health_asks_where_the_settings_say(topics: Topics, api: Api) -> None:
    port = api.url.rpartition(":")[2]
    topics.env = {"TOPICS_URL": "", "TOPICS_HOST": "0.0.0.0", "TOPICS_PORT": port}
    assert topics.good("health").value["status"] == "ok"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Server]:
    """A server whose probes need a key."""
    keys = tmp_path / "keys"
    keys.write_text("# of the checks\n\nprobe-key:read\nother-key\n")
    keys.chmod(0o600)
    server = Server(tmp_path, {"TOPICS_API_KEYS_FILE": str(keys), "TOPICS_PROBE_AUTH": "1"})
    server.process = server.spawn()
    told = tmp_path / "port"
    eventually(lambda: told.exists() and told.read_text().strip().isdigit(), "it listens", 30)
    yield server
    server.stop()


def test_health_shows_its_key_to_a_server_that_asks_probes_for_one(
    alone: Topics, guarded: Server, tmp_path: Path
) -> None:
    port = (tmp_path / "port").read_text().strip()
    there = {"TOPICS_URL": "", "TOPICS_HOST": "127.0.0.1", "TOPICS_PORT": port}
    alone.env = there
    eventually(lambda: alone("health").code == 1, "it answers")
    told = alone("health").err
    assert "TOPICS_PROBE_AUTH" in told
    assert "TOPICS_TOKEN_FILE" in told
    for given in (
        {"TOPICS_TOKEN": "other-key"},
        {"TOPICS_TOKEN_FILE": str(tmp_path / "keys")},
        # The key in the environment takes precedence, as in every command.
        {"TOPICS_TOKEN": "other-key", "TOPICS_TOKEN_FILE": "/nowhere"},
    ):
        alone.env = there | given
        eventually(lambda: alone("health", "--ready").code == 0, "it is ready", 20)
        assert alone("health").code == 0
    alone.env = there | {"TOPICS_TOKEN": "wrong-key"}
    ran = alone("health")
    assert ran.code == 1
    assert "unauthorized" in ran.err
    assert "wrong-key" not in ran.err


@pytest.mark.parametrize("kind", ["absent", "empty", "folder", "fifo"])
def test_a_token_file_that_is_none_is_one_line(alone: Topics, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "token"
    if kind == "empty":
        path.write_text("\n# no key\n")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    alone.env = {"TOPICS_TOKEN_FILE": str(path)}
    ran = alone("health")
    assert ran.code == 1
    (line,) = ran.err.splitlines()
    assert str(path) in line


def test_config_exits_with_1_for_what_would_be_refused(alone: Topics) -> None:
    alone.env = {"TOPICS_HOST": "0.0.0.0"}
    ran = alone("config", "--json")
    assert ran.code == 1
    assert "the server would not start" in ran.err


def test_a_directory_that_cannot_be_made_is_a_failure() -> None:
    found = doctor.rights_of("data", Path("/proc/topics/data"), Path("/proc"), 0o700)
    assert found.verdict == FAIL
    assert found.seen.startswith("/proc/topics/data cannot be made: /proc: ")
