"""Names of files, both ways."""

from __future__ import annotations

import pytest

from topics_server.wal import layout
from topics_server.wal.layout import WalName


def test_names_come_back_as_they_were() -> None:
    name = WalName(12, 3, 4567)
    assert layout.wal_file(name) == "000012-03-0000004567.wal"
    assert layout.parse_wal_file(layout.wal_file(name)) == name
    assert layout.parse_segment_file(layout.segment_data(9)) == (9, ".data")
    assert layout.parse_segment_file(layout.segment_idx(9)) == (9, ".idx")
    assert layout.parse_snapshot_file(layout.snapshot_file(10**19)) == 10**19
    assert layout.parse_topic_dir(layout.topic_dir(77)) == 77


def test_names_sort_as_numbers_do() -> None:
    names = [WalName(1, 0, 9), WalName(1, 0, 10), WalName(1, 2, 1), WalName(2, 0, 1)]
    assert [layout.wal_file(name) for name in names] == sorted(map(layout.wal_file, names))
    assert sorted(names) == names


@pytest.mark.parametrize(
    "name", ["", "LOCK", "000001-00-0000000001.wal.tmp", "1-0-1.wal", "x/000001-00-0000000001.wal"]
)
def test_other_names_are_no_host(name: str) -> None:
    assert layout.parse_wal_file(name) is None
    assert layout.parse_segment_file(name) is None
    assert layout.parse_snapshot_file(name) is None


@pytest.mark.parametrize("name", ["", "01", "-1", "1.tmp", "x", "١"])
def test_topic_directories_are_plain_decimals(name: str) -> None:
    assert layout.parse_topic_dir(name) is None


def test_parent_and_temp() -> None:
    assert layout.parent("a/b/c") == "a/b"
    assert layout.parent("a") == "."
    assert layout.parent("/a") == "/"
    assert layout.is_temp(layout.temp("a/FORMAT"))
    assert not layout.is_temp("a/FORMAT")
    assert layout.torn_file(WalName(1, 0, 2), 64) == "000001-00-0000000002.wal.64"
