"""topics.conf on a machine of its own, unmodified; see `host`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.driver import ROOT
from tests.proxy import host


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The observations of the program."""
    for program in ("nginx", "unshare", "ip", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(
                f"no {program} here; on Debian: apt-get install nginx-light openssl iproute2"
            )
    if not Path("/etc/nginx/conf.d").is_dir():
        pytest.skip("nginx is not installed as Debian's packages do it")
    apart = ["unshare", "--mount", "--net"]
    tried = subprocess.run([*apart, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"namespaces of its own need root: {tried.stderr.strip()}")
    folder = tmp_path_factory.mktemp("host")
    # The workers run as another user, which has to pass through.
    for each in (folder, *folder.parents):
        if each.stat().st_uid == os.geteuid() and each != Path("/tmp"):
            each.chmod(each.stat().st_mode | 0o011)
    done = subprocess.run(
        [*apart, sys.executable, "-m", host.__name__, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_debians_default_site_is_named_where_it_is_in_the_way(seen: dict[str, Any]) -> None:
    """Otherwise it would silently answer plain HTTP in place of our site."""
    told = "\n".join(seen["with the default site"])
    assert "duplicate default server" in told
    assert "/etc/nginx/sites-enabled/default" in told
    assert seen["without it"] == []
    said = " ".join((ROOT / "docs" / "OPERATIONS.md").read_text().split())
    assert "rm /etc/nginx/sites-enabled/default" in said


def test_it_starts_reloads_and_restarts_with_a_socket_as_its_output(seen: dict[str, Any]) -> None:
    assert seen["standard output"] == "socket"
    assert seen["health"] == seen["after reopen"] == seen["after reload"] == [200, None]
    assert [seen["reopen"][0], seen["reload"][0]] == [0, 0], seen
    assert seen["workers end"] is None
    assert seen["end"] == 0
    assert seen["after a restart"] == [200, None]
    assert seen["said"] == []


def test_plain_http_is_sent_to_https(seen: dict[str, Any]) -> None:
    assert seen["plain"] == [308, "https://events.example/v0/topics/a?x=%20y"]
    assert seen["nameless"].split()[1] == "400"
    # nginx serves it and does not redirect: it looks for certbot's files.
    assert seen["challenge"] == [404, None]


def test_it_logs_to_files(seen: dict[str, Any]) -> None:
    assert {"topics.access.log", "topics.access.log.1", "topics.error.log"} <= {*seen["logs"]}
    assert seen["logged"] == [["/v0/health", 200], ["/v0/health", 200], ["/v0/ready", 200]]
