"""The imports of a start: only modules that serving needs, so that the server is ready soon.

docs/decisions/0260 lists the modules that come later, and what each costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Final

import pytest

from topics_server.server import LATE_MODULES

# Not imported by the time an empty server is ready; a folder's name covers its modules.
LATE: Final = (
    "topics_server.api.openapi",
    "topics_server.archive",
    "topics_server.client",
    "topics_server.demo",
    "topics_server.http.websocket",
    "topics_server.node.backups",
    "topics_server.runtime.prometheus",
    "topics_server.views.workers.records",
    "topics_server.views.workers.sandbox",
    "topics_server.views.workers.view_file",
    "topics_server.wal.tools",
    "difflib",
    "httpx",
    "prometheus_client",
    "rich",
    "sqlite3",
    "urllib.request",
    "websockets",
)
# Runs `topics serve`; prints the modules when the server is ready, then stops it.
SCRIPT: Final = """
import json, os, signal, sys
from topics_server import __main__, server

def show():
    # None keeps a module from being imported (`cli`).
    print(json.dumps(sorted(name for name, module in sys.modules.items() if module is not None)))
    os.kill(os.getpid(), signal.SIGTERM)

server.import_late = show
sys.argv = ["topics", "serve", "--host", "127.0.0.1", "--port", "0", "--data-dir", sys.argv[1]]
__main__.main()
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """The names of the modules that a server has imported when it is ready."""
    folder = tmp_path_factory.mktemp("start")
    environment = {name: value for name, value in os.environ.items() if name[:7] != "TOPICS_"}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "data")],
        capture_output=True,
        check=True,
        timeout=60,
        env=environment,
    )
    lines = [line for line in found.stdout.decode().splitlines() if line.startswith("[")]
    return frozenset(json.loads(lines[-1]))


@pytest.mark.parametrize("name", LATE)
def test_a_start_does_not_import_what_serving_does_not_need(
    name: str, imported: frozenset[str]
) -> None:
    assert not [module for module in imported if module == name or module.startswith(f"{name}.")]


def test_the_start_was_a_whole_one(imported: frozenset[str]) -> None:
    """Otherwise the modules above could be missing because the start failed."""
    assert {"topics_server.http.connection", "topics_server.node.boot", "uvloop"} <= imported


def test_what_comes_behind_the_start_can_be_imported() -> None:
    code = (
        "import sys\nfrom topics_server.server import LATE_MODULES, import_late\n"
        "before = [name for name in LATE_MODULES if name in sys.modules]\n"
        "import_late()\n"
        "print(before, [name for name in LATE_MODULES if name not in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().strip() == "[] []"
    assert done.stderr == b""


def test_late_modules_are_among_those_that_a_start_does_without() -> None:
    assert set(LATE_MODULES) <= set(LATE)
