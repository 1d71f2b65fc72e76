"""`client.front.cursors`: the content of a cursor file, and when a position is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from topics_server.client.front.cursors import FileCursor, SaveTurns


def test_a_file_keeps_the_last_cursor_and_nothing_beside_it(tmp_path: Path) -> None:
    store = FileCursor(tmp_path / "c")
    assert store.load() is None
    for cursor in ("one", "two — ü"):
        store.save(cursor)
        assert FileCursor(tmp_path / "c").load() == cursor
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_save_that_fails_leaves_the_old_cursor(tmp_path: Path) -> None:
    store = FileCursor(tmp_path / "c")
    store.save("old")
    (tmp_path / "c.new").mkdir()
    with pytest.raises(OSError):
        store.save("new")
    assert store.load() == "old"


def test_positions_are_saved_at_the_end_of_a_page_and_once_a_second_within() -> None:
    turns: SaveTurns[str] = SaveTurns(0, 0, bool)
    assert turns.handled("a", 1, is_last=False) is None
    assert turns.handled("b", 2, is_last=True) == "b"
    assert turns.rest(3) is None
    assert turns.handled("c", 4, is_last=False) is None
    assert turns.handled("d", 1003, is_last=False) == "d"
    assert turns.handled("e", 1004, is_last=False) is None
    assert turns.rest(1005) == "e"


def test_positions_are_saved_rarely_if_asked_to() -> None:
    turns: SaveTurns[str] = SaveTurns(5000, 0, bool)
    assert turns.handled("a", 4999, is_last=True) is None
    assert turns.handled("b", 5000, is_last=False) == "b"
    assert turns.handled("c", 9999, is_last=True) is None
    assert turns.rest(9999) == "c"
    with pytest.raises(ValueError, match="save_every_ms"):
        SaveTurns(-1, 0, bool)
