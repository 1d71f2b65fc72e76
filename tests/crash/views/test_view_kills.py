"""After `kill -9` of the server and of its view processes every row of every view is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.views.view_kills import ViewKills


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_kill_9_leaves_every_row_of_every_view_right(
    tmp_path: Path, view_kills: int, first_seed: int
) -> None:
    """`--view-kills` sets how often the server or its view processes die."""
    chaos = ViewKills(tmp_path, first_seed)
    chaos.run(view_kills)
    print(
        f"\n{chaos.server_kills} servers and {chaos.process_kills} times view processes killed, "
        f"{chaos.checked} rows compared, {chaos.answers} answers with after, "
        f"{chaos.changes} definitions"
    )
    assert chaos.server_kills + chaos.process_kills == view_kills
    assert chaos.checked > 0
    assert chaos.answers > 0
