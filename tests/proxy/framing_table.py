"""Writes `docs/FRAMING.md`: `python -m tests.proxy.framing_table`.

The page has each case of `tests/api/framing`, the server's direct answer (which `tests/api`
checks), and the answer through this machine's nginx.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tests.api.framing import CASES
from tests.contract.driver import ROOT
from tests.proxy import framing, nginx

HEAD: Final = """# Framing

This table lists requests that two servers in a row might read differently. In each case a client
sends these bytes and then a valid request on the same connection. *direct* is this server's
answer; `tests/api/test_framing.py` checks it. *{version}* is the answer through nginx with the
shipped configuration when `python -m tests.proxy.framing_table` made this page. nginx parses a
request first and forwards it in its own form, so the two columns may differ. For any nginx
version, `tests/proxy/test_framing.py` checks that both servers see the same requests, that each
answer belongs to its request, and that no hidden request is served. *next* says whether the valid
request got its own answer (`answered`) or found the connection closed (`closed`).

| sent | direct | next | {version} | next |
|---|---|---|---|---|
"""


def main() -> None:
    """Write the page."""
    path = nginx.program()
    assert path is not None, nginx.INSTALL
    told = subprocess.run([path, "-v"], capture_output=True, text=True, check=True).stderr
    version = told.strip().rpartition(" ")[2].replace("/", " ")
    lines = [HEAD.format(version=version)]
    with (
        tempfile.TemporaryDirectory() as folder,
        framing.running(path, Path(folder)) as (server, raw),
    ):
        server.api.put("framing")
        for case in CASES:
            judged = framing.judge(raw, case)
            direct = ", ".join(map(str, case.answers))
            cells = (
                case.name,
                direct,
                "answered" if case.stays else "closed",
                judged.verdict,
                "answered" if judged.answered else "closed",
            )
            lines.append("| " + " | ".join(cells) + " |\n")
    (ROOT / "docs" / "FRAMING.md").write_text("".join(lines))


if __name__ == "__main__":
    main()
