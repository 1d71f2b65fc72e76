"""The code blocks of the documentation, and a shell that runs their lines and compares the output.

A page's blocks run in order against one server of its own, in a folder of its own. Small scripts
replace `curl` and `topics`: they end endless calls, and pass `--yes` where a user at a terminal
would confirm.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.contract.driver import ROOT
from tests.streams import node

# The time after which a command is ended that would otherwise run until Ctrl-C. A worker has to
# get its jobs in that time, so a machine with other work has more.
ENDLESS_S: Final = 5
WITHIN_S: Final = 110
# The parts of an answer that differ from run to run.
VARYING: Final = frozenset(
    {"$ts", "deadline", "lease_id", "wid", "stream_url", "performance", "elapsed_ms", "bytes"}
)
_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INDENTED: Final = re.compile(r"(?:(?<=\n\n)|\A)((?:    \S.*\n)(?:    .*\n|\n(?=    ))*)")
_COMMAND: Final = re.compile(r"    (?:topics|curl|\./run|pip|python3?|docker|spark)\b")

CURL: Final = """#!/bin/sh
# A stream of events ends here after some seconds, which is no failure.
case " $* " in
    *" -N "*|*" -sN "*) {curl} --max-time {seconds} "$@"; code=$?; [ $code = 28 ] || exit $code ;;
    *) exec {curl} "$@" ;;
esac
"""
TOPICS: Final = """#!/bin/sh
# What goes on until Ctrl-C gets one after some seconds; what asks a person is told yes.
case " $* " in
    *" tail "*|*" --follow "*|*" follow "*|*" work "*)
        timeout --signal=INT {seconds} {python} -m topics_server "$@"
        code=$?; [ $code = 124 ] || exit $code ;;
    " rm webhooks ") exec {python} -m topics_server "$@" --yes ;;
    *) exec {python} -m topics_server "$@" ;;
esac
"""


class Block(NamedTuple):
    """A block of code: its page below the repository, first line, language and text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language})"


def blocks_of(path: Path) -> list[Block]:
    """Every block of a page with a language, and indented blocks that begin with a command."""
    text = path.read_text()
    page = str(path.relative_to(ROOT))
    found = [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for match in _FENCE.finditer(text)
        if match[1]
    ]
    outside = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _INDENTED.finditer(outside):
        if _COMMAND.match(match[1]):
            line = outside.count("\n", 0, match.start(1)) + 1
            code = re.sub(r"^    ", "", match[1], flags=re.MULTILINE)
            found.append(Block(page, line, "sh", code))
    return sorted(found, key=lambda block: block.line)


class Step(NamedTuple):
    """A command and its expected output in the block."""

    command: str
    shown: list[str]


def steps_of(block: Block) -> list[Step]:
    """The commands of a shell block, each with the output shown after it."""
    lines = block.text.replace("\\\n", " ").splitlines()
    found: list[Step] = []
    for line in lines:
        if block.language == "console" and line.startswith("$ "):
            found.append(Step(line.removeprefix("$ "), []))
        elif block.language == "console" and line.strip():
            found[-1].shown.append(line)
        elif block.language != "console" and line.strip() and not line.startswith("#"):
            found.append(Step(line, []))
    # The page says "in another terminal": its server already runs.
    return [step for step in found if not re.match(r"(?:topics|\./run) serve\b", step.command)]


def endless_s() -> int:
    """`ENDLESS_S`, once for each process that waits for a core."""
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return ENDLESS_S * min(6, max(1, round(waiting)))


class Shell:
    """A folder with the commands that pages use, and a server for them."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self._replaced: dict[str, str] = {}
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        values = {"curl": shutil.which("curl"), "python": sys.executable, "seconds": endless_s()}
        for name, script in (("curl", CURL), ("topics", TOPICS)):
            (programs / name).write_text(script.format(**values))
            (programs / name).chmod(0o755)
        (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (programs / "python").chmod(0o755)
        # A script ends the processes that it starts.
        (programs / "topics-itself").write_text(
            f'#!/bin/sh\nexec {sys.executable} -m topics_server "$@"\n'
        )
        (programs / "topics-itself").chmod(0o755)
        for name in ("examples", "docs"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "node_modules").mkdir()
        (folder / "node_modules" / "topics-client").symlink_to(ROOT / "clients" / "js")
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TOPICS_")}
        self.env = {
            **kept,
            "PATH": f"{programs}{os.pathsep}{kept['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "TOPICS_URL": url,
            "TOPICS": "topics-itself",
        }

    def _here(self, text: str) -> str:
        """The text of a page with our server's URL, and with the ids of this run instead of those
        shown.
        """
        host = self.url.removeprefix("http://")
        text = re.sub(r"(?:localhost|127\.0\.0\.1):4000", host, text)
        for shown, found in self._replaced.items():
            text = text.replace(shown, found)
        return text

    def run(self, step: Step) -> None:
        """Run a command; its exit code and output must match those shown."""
        done = subprocess.run(
            ["bash", "-c", self._here(step.command)],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        said = f"$ {step.command}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, said
        assert '"error":{' not in done.stdout, said
        printed = (done.stderr + done.stdout).splitlines()
        for shown in step.shown:
            assert any(self._is_as(shown, line) for line in printed), f"{shown}\nis not in\n{said}"

    def _is_as(self, shown: str, line: str) -> bool:
        """Whether a printed line equals the shown one, apart from what differs from run to run."""
        if not shown.removeprefix("data: ").startswith("{"):
            # Only the beginning of a table's line is compared: times differ, and widths depend on
            # the terminal.
            return re.sub(r"\d", "0", shown)[:40] == re.sub(r"\d", "0", line)[:40]
        if "…" in shown:
            return line.startswith(shown.partition("…")[0])
        try:
            wanted, found = (json.loads(text.removeprefix("data: ")) for text in (shown, line))
        except ValueError:
            return False
        if "wid" in wanted and "wid" in found:
            self._replaced[wanted["wid"]] = found["wid"]
        return bool(_plain(wanted) == _plain(found))

    def python(self, block: Block) -> None:
        """Run a block of Python."""
        done = subprocess.run(
            [sys.executable, "-c", self._here(block.text)],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def javascript(self, block: Block) -> None:
        """Run a block of JavaScript, a module of Node."""
        (self.folder / "block.mjs").write_text(self._here(block.text))
        found = node.find()
        done = subprocess.run(
            [found.path, "block.mjs"],
            cwd=self.folder,
            env={**found.environment(), **self.env},
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def _plain(value: Any) -> Any:
    """A JSON value without the parts that differ from run to run."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k not in VARYING}
    return [_plain(each) for each in value] if isinstance(value, list) else value
