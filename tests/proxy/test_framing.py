"""Through nginx: the rows of `tests/api/framing`, and how two servers read
them.

nginx parses a request first and forwards it in its own form. So it may serve a row here that our
server refuses directly, and the other way round. What must hold: no request gets the answer to
another one, and no hidden request is ever served. `docs/FRAMING.md` states both results; `python -m
tests.proxy.framing_table` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.api.framing import CASES, SMUGGLED, TOPIC, Case
from tests.contract.driver import ROOT, Server
from tests.proxy import framing
from tests.proxy.framing import Judged, judge

# nginx ignores these upgrades, so the following bytes are an ordinary request: both servers read
# two requests, each answered in its turn.
TWO_REQUESTS: Final = frozenset({"an upgrade with a request behind"})
TABLE: Final = ROOT / "docs" / "FRAMING.md"


@pytest.fixture(scope="module")
def both(
    nginx_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, framing.Raw]]:
    """A server and, before it, an nginx that also accepts plain connections and waits briefly."""
    folder: Path = tmp_path_factory.mktemp("framing")
    with framing.running(nginx_path, folder) as found:
        found[0].api.put(TOPIC)
        yield found


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bytes_are_read_as_the_same_requests_by_both_servers(
    both: tuple[Server, framing.Raw], case: Case
) -> None:
    server, raw = both
    judged: Judged = judge(raw, case)
    # The answers are complete, each belongs to its request, and the honest request has its own.
    assert judged.is_clear, judged
    # nginx forwarded or refused exactly as many requests as there are answers.
    assert judged.passed_on + judged.refused >= len(judged.statuses), judged
    is_served = server.api.state(SMUGGLED).status_code == 200
    assert is_served == (case.name in TWO_REQUESTS), f"a hidden request was served: {judged}"
    if is_served:
        assert judged.statuses == [200, 201]
        server.api.drop(SMUGGLED)
    # The connection to the server is intact: the next client gets its own answer.
    for number in range(3):
        assert raw.ask(f"after-{number}") == f"after-{number}"


def test_the_table_has_every_case() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    assert len(CASES) >= 60
    for case in CASES:
        direct = ", ".join(map(str, case.answers))
        assert any(row.startswith(f"| {case.name} | {direct} |") for row in rows), (
            f"docs/FRAMING.md has no row for {case.name!r}: python -m tests.proxy.framing_table"
        )
