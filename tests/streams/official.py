"""The official conformance suite of Durable Streams, run by vitest against a URL.

Owns the process, its time limit, and the parsing of its report. `suite/package-lock.json` pins its
version; `CASES` and `LEFT_OUT` are those of that version, so that a case which silently drops out
is a failure. To run it by hand against any server:

    TOPICS_STREAMS_URL=http://127.0.0.1:4437 ./run test tests/streams/test_conformance.py

`killing` handles the requests by which the suite asks for a kill of its server (see
`suite/conformance.test.mjs`); that server must restart on the same port.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.contract.driver import ROOT
from tests.streams import node

SUITE: Final = ROOT / "tests" / "streams" / "suite"
CASES: Final = 332
# An extension of the protocol, off by default.
LEFT_OUT: Final = 6
LEFT_OUT_GROUP: Final = "Reserved subscription APIs"
GROUPS: Final = 33
WITHIN_S: Final = 540.0
# Cases that measure lifetimes of one or two seconds between their own requests. On a busy machine
# these requests come late.
_LIFETIME: Final = re.compile("TTL|expir", re.IGNORECASE)
_NOT_WORD: Final = re.compile(r"[^\w ]")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of every case; the values of `failed` give the reasons."""

    passed: tuple[str, ...]
    failed: Mapping[str, str]
    skipped: tuple[str, ...]
    seconds: float

    def is_late(self) -> bool:
        """Whether cases failed, and all of them measure lifetimes."""
        return bool(self.failed) and all(map(_LIFETIME.search, self.failed))

    def after(self, again: Outcome) -> Outcome:
        """The outcome after the failed cases ran again."""
        failed = {name: why for name, why in self.failed.items() if name not in again.passed}
        passed = (*self.passed, *(name for name in self.failed if name in again.passed))
        return Outcome(passed, failed, self.skipped, self.seconds + again.seconds)

    def check(self) -> None:
        """Check that every case is present and passed; otherwise fail with the names of the
        others.
        """
        told = "\n".join(f"  {name}\n      {why}" for name, why in self.failed.items())
        assert not self.failed, f"{len(self.failed)} of {CASES} cases failed:\n{told}"
        assert len(self.passed) == CASES
        assert len(self.skipped) == LEFT_OUT
        assert all(name.startswith(LEFT_OUT_GROUP) for name in self.skipped)


def run(
    folder: Path,
    found: node.Node,
    url: str,
    report: Path,
    more: Mapping[str, str] | None = None,
    only: Iterable[str] = (),
) -> Outcome:
    """Run the whole suite, or `only` these cases. Bounded by `WITHIN_S`.

    `more` goes into its environment.
    """
    words = [found.path, "node_modules/vitest/vitest.mjs", "run", "conformance.test.mjs"]
    words += ["--root", str(folder), "--reporter=json", f"--outputFile={report}"]
    # A kill takes its time, and so does a busy machine; the default is five seconds.
    words += ["--testTimeout=30000"]
    if only:
        plain = "|".join(_NOT_WORD.sub(".", name.replace(" > ", " ")) for name in only)
        words.append(f"--testNamePattern={plain}")
    report.unlink(missing_ok=True)
    began = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=found.environment() | {"SUITE_URL": url} | dict(more or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=WITHIN_S)
    except BaseException as error:
        process.terminate()  # vitest ends its own workers
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=20)
        process.kill()
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(f"the suite did not end within {WITHIN_S:.0f} s") from None
        raise
    assert report.exists(), f"the suite ended with {process.returncode} and no report:\n{said}"
    return _read(json.loads(report.read_bytes()), time.monotonic() - began)


def _read(report: dict[str, Any], seconds: float) -> Outcome:
    passed, skipped, failed = [], [], {}
    for file in report["testResults"]:
        for case in file["assertionResults"]:
            name = " > ".join([*case["ancestorTitles"], case["title"]])
            assert name not in failed, f"two cases of one name: {name}"
            match case["status"]:
                case "passed":
                    passed.append(name)
                case "skipped" | "pending" | "todo":
                    skipped.append(name)
                case _:
                    failed[name] = "\n".join(case["failureMessages"])[:600]
        if not file["assertionResults"]:
            failed[Path(file["name"]).name] = str(file["message"])[:2000]
    assert len(set(passed)) == len(passed), "two cases of one name"
    return Outcome(tuple(passed), failed, tuple(skipped), seconds)


@contextlib.contextmanager
def killing(kill: Callable[[], object]) -> Iterator[dict[str, str]]:
    """The environment with which the suite can call `kill`, one call at a time, inside the
    block.
    """

    class Control(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            try:
                kill()
                status, told = 200, b""
            except AssertionError as error:  # the server did not come back: the case reports it
                status, told = 500, str(error).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    control = http.server.HTTPServer(("127.0.0.1", 0), Control)
    thread = threading.Thread(target=control.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield {"SUITE_CONTROL": f"http://127.0.0.1:{control.server_port}/"}
    finally:
        control.shutdown()
        thread.join()
        control.server_close()
