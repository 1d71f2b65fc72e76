"""`topics torture`: a whole run passes on a good disk, and a broken promise is found."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tests.cli.conftest import Topics
from topics_server.cli.connection import Failure, ServerConnection
from topics_server.cli.server.child import child_server
from topics_server.cli.torture import cycles
from topics_server.cli.torture.cycles import Broken, TortureRun
from topics_server.cli.torture.own_folder import OwnFolder
from topics_server.values.limits import MIB

pytestmark = pytest.mark.crash


@pytest.fixture(autouse=True)
def short_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "WRITE_S", (0.2, 0.4))


def run_of(folder: OwnFolder) -> TortureRun:
    return TortureRun(
        folder,
        writers=1,
        size_limit=512 * MIB,
        stop=threading.Event(),
        report=lambda _: None,
    )


def cycle_with_appends(run: TortureRun) -> None:
    """On a busy machine the server may be killed before its first answer."""
    before = run.totals.appends
    while run.totals.appends == before:
        run.cycle()


@pytest.mark.timeout(400)
def test_a_run_does_everything_once_and_cleans_up(tmp_path: Path) -> None:
    topics = Topics("http://127.0.0.1:1", tmp_path)
    words = ("torture", "new", "--minutes", "0", "--size-limit", "512MiB", "--json")
    with topics.spawn(*words, stderr=subprocess.PIPE) as verb:
        try:
            out, err = verb.communicate(timeout=300)
        finally:
            verb.kill()
    # Exit code 3 is allowed: this disk's syncs may be suspiciously fast.
    assert verb.returncode in (0, 3), err
    found = json.loads(out)
    assert found["verdict"] == ("passed" if verb.returncode == 0 else "suspicious")
    assert found["totals"]["cycles"] >= 2
    assert found["totals"]["kills"] >= 3
    # Other programs may make room meanwhile.
    assert found["totals"]["disk_full"].startswith(("refused after", "not reached"))
    assert found["syncs"]["count"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    ran = Topics("http://127.0.0.1:1", tmp_path)("torture", ".", "--minutes", "0")
    assert ran.code == 2
    assert "is not empty" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_record_that_disappears_is_found(tmp_path: Path) -> None:
    folder = OwnFolder(tmp_path / "new")
    run = run_of(folder)
    cycle_with_appends(run)
    with child_server(folder.path, 0, threading.Event()) as (_, url):
        client = ServerConnection(url)
        client.call("POST", "/v0/topics/torture-fsync-0/delete", b'{"before_seq": 1000000}')
        client.close()
    with pytest.raises(Broken) as caught:
        run.cycle()
    assert "was acknowledged and is lost" in caught.value.args[0]


def test_an_older_copy_of_the_store_is_found(tmp_path: Path) -> None:
    folder = OwnFolder(tmp_path / "new")
    run = run_of(folder)
    cycle_with_appends(run)
    shutil.copytree(folder.data, tmp_path / "older")
    cycle_with_appends(run)
    shutil.rmtree(folder.data)
    (tmp_path / "older").rename(folder.data)
    # The server may refuse the copy, or serve it without the newer records.
    with pytest.raises((Broken, Failure)) as caught:
        run.cycle()
    assert any(word in str(caught.value.args) for word in ("lost", "went back", "did not start"))
