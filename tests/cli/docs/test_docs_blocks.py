"""Every code block of the documentation runs, or is listed here with the reason why it does not."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.cli.conftest import COMMAND
from tests.cli.docs.docs_blocks import Block, Shell, blocks_of, steps_of
from tests.contract.driver import ROOT, Server
from topics_server.cli import VERBS, main

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/*.md")),
    *sorted((ROOT / "clients").glob("*/*.md")),
]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]

# A page and a text of one of its blocks, with the reason why the block does not run here.
NOT_RUN = {
    (
        "docs/OPERATIONS.md",
        "docker build",
    ): "wants a container engine; tests/docker reads the lines",
    ("docs/VIEWS.md", "CREATE TABLE revenue"): "a body; contract/views/test_views.py sends it",
    ("README.md", "git clone REPOSITORY"): "clones, and runs a server and all tests",
    ("README.md", 'curl --json \'{"records"'): "run by test_readme.py, to the byte",
    (
        "docs/ANALYTICS.md",
        "./run spark-setup",
    ): "needs Spark and a Java; tests/spark/test_docs_blocks.py",
    ("docs/ANALYTICS.md", 'spark_session("mine")'): "needs Spark; tests/spark/test_docs_blocks.py",
    ("docs/ANALYTICS.md", "topics pipeline init"): "needs Spark; tests/spark/test_docs_blocks.py",
    ("docs/ANALYTICS.md", "CREATE TABLE events"): "needs Spark; tests/spark/test_docs_blocks.py",
    ("docs/ANALYTICS.md", "spark.read.format"): "needs Spark; tests/spark/test_docs_blocks.py",
    ("docs/ANALYTICS.md", "spark.readStream"): "needs Spark; tests/spark/test_docs_blocks.py",
    (
        "docs/ANALYTICS.md",
        "topics export 'orders.*'",
    ): "Parquet needs pyarrow; tests/spark/test_docs_blocks.py",
    ("docs/ANALYTICS.md", "read_output"): "needs Spark; tests/spark/test_docs_blocks.py",
    ("docs/ANALYTICS.md", "topics jobs to_iceberg"): "needs pyiceberg; spark/test_docs_blocks.py",
    ("docs/ANALYTICS.md", "sqlite_catalog"): "needs pyiceberg; tests/spark/test_docs_blocks.py",
    ("docs/TOUR.md", "./run jobs topic_volume"): "needs Spark; tests/spark/test_docs_blocks.py",
    (
        "docs/PERFORMANCE.md",
        "./run bench",
    ): "benchmarks of minutes to an hour",
    ("docs/EMBEDDING.md", "uvicorn --factory"): "until Ctrl-C; tests/unit/test_app.py",
    ("docs/EMBEDDING.md", "FastAPI"): "tests/browser/test_embedded.py runs the same file",
    ("README.md", "new EventSource"): "lines of a page; tests/browser/test_live.py runs them",
    ("docs/READS.md", "new EventSource"): "lines of a page; as those of README.md",
    ("docs/READS.md", '"op": "subscribe"'): "a message; tests/api/watch/test_ws_prefixes.py",
    ("docs/EMBEDDING.md", "new EventSource"): "a line of a page; tests/browser/test_embedded.py",
    ("docs/BACKUP.md", "topics backup DIR"): "names of a reader; tests/cli/server/test_backup.py",
    ("docs/BACKUP.md", "topics backups ls"): "names of a reader; tests/cli/server/test_backup.py",
    ("docs/BACKUP.md", "serve --data-dir"): "names of a reader; tests/cli/server/test_backup.py",
    ("docs/BACKUP.md", "/scratch/drill"): "names of a reader; tests/cli/server/test_backup.py",
    ("docs/BACKUP.md", "TOPICS_ARCHIVE_URL=file"): "until Ctrl-C; contract/operation/test_archive",
    ("docs/BACKUP.md", "topics archive ls"): "names of a reader; tests/cli/server/test_archive.py",
    ("docs/BACKUP.md", "archive prune"): "names of a reader; tests/cli/server/test_archive.py",
    ("docs/BACKUP.md", "topics archive drill"): "names of a reader; tests/cli/server/test_drill.py",
    ("docs/BACKUP.md", "topics backups drill"): "names of a reader; tests/cli/server/test_drill.py",
    (
        "docs/OPERATIONS.md",
        "topics torture",
    ): "takes minutes; tests/crash/kills/test_torture_verb.py",
    ("docs/CLI.md", "pip install CHECKOUT"): "downloads; the wheel is installed below",
    ("docs/CLI.md", "pip wheel"): "downloads the build backend; the wheel is made below",
    ("examples/analytics/README.md", "topics jobs"): "needs Spark; tests/spark/test_docs_blocks.py",
    ("examples/browser/README.md", "http.server"): "serves pages until Ctrl-C; tests/browser",
    ("examples/dashboard/README.md", "http.server"): "serves pages until Ctrl-C; tests/browser",
    ("examples/coordination/README.md", "claim.py"): "tests/examples/test_coordination.py",
    ("examples/mirror/README.md", "mirror.py"): "two servers; tests/cli/test_mirror.py",
    ("examples/mirror/README.md", "--url http://127.0.0.1:4001"): "tests/cli/test_mirror.py",
    ("examples/workers/README.md", "worker.py"): "until Ctrl-C; tests/cli/test_queues.py",
    ("examples/workers/README.md", "topics work"): "until Ctrl-C; tests/cli/test_queues.py",
    ("examples/workers/README.md", "run.sh"): "run by tests/cli/test_queues.py",
}


def reason(block: Block) -> str | None:
    for (page, words), why in NOT_RUN.items():
        if block.page == page and words in block.text:
            return why
    return None


RUN = [block for block in BLOCKS if reason(block) is None]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", sorted({block.page for block in RUN}))
def test_the_blocks_of_a_page_do_what_they_show(tmp_path: Path, page: str) -> None:
    server = Server(tmp_path / "server")
    (tmp_path / "folder").mkdir()
    shell = Shell(tmp_path / "folder", server.start().url)
    try:
        for block in RUN:
            if block.page != page:
                continue
            if block.language == "python":
                shell.python(block)
                continue
            if block.language == "js":
                shell.javascript(block)
                continue
            assert block.language in ("sh", "console"), f"{block}: nothing here runs it"
            for step in steps_of(block):
                shell.run(step)
    finally:
        server.stop()


def test_what_is_not_run_is_there_and_says_why() -> None:
    idle = [
        key for key in NOT_RUN if not any(b.page == key[0] and key[1] in b.text for b in BLOCKS)
    ]
    assert idle == []
    assert len(BLOCKS) >= 30


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_blocks_of_python_are_python(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("topics"):
            found = __import__(node.module, fromlist=["x"])
            assert [name.name for name in node.names if not hasattr(found, name.name)] == []


# -- commands in prose ---------------------------------------------------------------------------


def calls_of(line: str) -> list[list[str]]:
    """The words after `topics` of each call of it in a line of shell, up to a pipe or a `--`."""
    lexer = shlex.shlex(line.replace("…", ""), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = []
    is_inside, is_first = False, True
    for word in lexer:
        if set(word) <= set("|&;()<>"):
            is_inside, is_first = False, True
        elif is_inside and word == "--":
            is_inside = False
        elif is_inside:
            found[-1].append(word)
        elif is_first and "=" not in word and word.rpartition("/")[2] == "topics":
            found.append([])
            is_inside, is_first = True, False
        else:
            is_first = "=" in word  # a variable before a command
    return found


def spoken() -> list[tuple[str, str]]:
    """Every call of `topics` in the prose of a page and in its shell blocks."""
    lines: list[tuple[str, str]] = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        codes = re.findall(r"`((?:[^`\n]*\| )?topics [^`\n]*)`", page.read_text())
        lines += [(name, code) for code in codes]
    for block in BLOCKS:
        if block.language in ("sh", "console"):
            lines += [(block.page, step.command) for step in steps_of(block)]
    return [(page, shlex.join(words)) for page, line in lines for words in calls_of(line)]


@pytest.mark.parametrize(("page", "code"), sorted(set(spoken())), ids=lambda each: str(each)[:60])
def test_commands_name_verbs_and_options_that_there_are(page: str, code: str) -> None:
    words = shlex.split(code)
    if not words or words[0].isupper() or words[0].startswith("-"):
        return  # `topics VERB --help`, `topics --version`
    assert words[0] in VERBS, code
    command: click.Command | None = main.get_command(click.Context(main), words[0])
    rest = words[1:]
    while isinstance(command, click.Group) and rest and rest[0] in command.commands:
        command, rest = command.commands[rest[0]], rest[1:]
    assert command is not None
    if isinstance(command, click.Group) and command.name == "queue":
        command = command.commands["show"]
    if words[0] in ("export", "jobs", "pipeline"):
        return  # another parser reads their options
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    known |= {"--help", "-h"}
    asked = [word.partition("=")[0] for word in rest if re.fullmatch(r"-[a-z-].*", word)]
    assert [word for word in asked if word not in known] == [], code


# -- the wheel -------------------------------------------------------------------------------------


def test_a_wheel_is_made_and_brings_command_and_client(tmp_path: Path) -> None:
    """The commands are those of CLI.md, but use the installed build backend and install no
    dependencies.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheels = tmp_path / "wheels"
    make = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)]
    subprocess.run([*pip, *make], check=True, timeout=240, cwd=tmp_path)
    (wheel,) = wheels.glob("topics_server-*-py3-none-any.whl")
    there = tmp_path / "there"
    install = ["install", "--no-deps", "--no-index", "--target", str(there), str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=240, cwd=tmp_path)
    env = {**os.environ, "PYTHONPATH": str(there)}
    code = "import topics_server.client as c; print(c.__file__, c.IdempotentProducer.__name__)"
    events = (
        "from topics_server.cli.server.demo import webhook_events; print(len(webhook_events()))"
    )
    for command, wanted in (
        ([str(there / "bin" / "topics"), "--version"], "topics, version"),
        ([sys.executable, "-c", code], str(there / "topics_server" / "client")),
        ([*COMMAND, "completion", "bash"], "_TOPICS_COMPLETE"),
        ([sys.executable, "-c", events], "329"),
    ):
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        assert wanted in done.stdout
    assert "Gregor Martynus" in (there / "topics_server" / "demo" / "README.md").read_text()
