"""The client's producers through `--kills` kills: no record lost, doubled or out of order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.driver import Server
from tests.contract.records.producing import check, messages_in, storm, stream_in


@pytest.mark.crash
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["topic", "stream"])
def test_producers_write_everything_once_through_kills(
    kills: int, tmp_path: Path, kind: str
) -> None:
    server = Server(tmp_path)
    try:
        if kind == "topic":
            sent = storm(server, kills, lambda api: f"{api.url}/v0/topics/t")
            check([record["data"] for record in server.api.read_all("t")], sent)
        else:
            sent = storm(server, kills, stream_in)
            check(messages_in(server.api), sent)
    finally:
        server.stop()
