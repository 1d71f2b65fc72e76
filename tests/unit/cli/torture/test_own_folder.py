"""`cli.torture.own_folder`: a folder in use is refused, and the run removes only its own files."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from topics_server.cli.connection import Failure
from topics_server.cli.torture.own_folder import OwnFolder


def fill(folder: OwnFolder) -> None:
    (folder.data / "wal").mkdir(parents=True)
    (folder.data / "wal" / "1.wal").write_bytes(b"x" * 100_000)
    (folder.path / "server.log").write_text("log")
    (folder.path / "port").write_text("1")


def test_a_folder_with_anything_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("mine")
    with pytest.raises(click.UsageError, match="is not empty"):
        OwnFolder(tmp_path)
    with pytest.raises(click.UsageError, match="is not a folder"):
        OwnFolder(tmp_path / ".hidden")
    with pytest.raises(Failure, match="No such file"):
        OwnFolder(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == [".hidden"]


def test_a_folder_that_was_made_goes_again(tmp_path: Path) -> None:
    folder = OwnFolder(tmp_path / "new")
    fill(folder)
    assert folder.used_bytes() >= 100_000
    folder.clean_up()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_and_what_others_put_there_stay(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    folder = OwnFolder(there)
    fill(folder)
    folder.clean_up()
    assert list(there.iterdir()) == []
    folder = OwnFolder(tmp_path / "new")
    fill(folder)
    (folder.path / "theirs").write_text("mine")
    folder.clean_up()
    assert [path.name for path in folder.path.iterdir()] == ["theirs"]


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    folder = OwnFolder(tmp_path / "new")
    with pytest.raises(Failure, match="make room, or lower --size-limit"):
        folder.require(1 << 60)
    folder.require(0)
