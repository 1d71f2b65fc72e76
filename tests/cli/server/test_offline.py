"""Verbs without a server: help, configuration, refusals of `serve`, and files on disk."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.cli.conftest import COMMAND, WEBHOOKS, MakeServer, Topics
from tests.contract.driver import ROOT, Api
from topics_server.cli import VERBS, main

HEAVY = ("asyncio", "httpx", "numpy", "pydantic", "rich", "uvicorn")


def test_help_lists_every_verb_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom topics_server.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=30)
    *help_lines, heavy = done.stdout.decode().splitlines()
    listed = [line.split()[0] for line in help_lines if line.startswith("  ") and line.split()]
    assert [verb for verb in listed if verb in VERBS][-len(VERBS) :] == list(VERBS)
    assert heavy == "[]"


@pytest.mark.parametrize("verb", ["append", "health", "ls", "pub", "read", "tail"])
def test_a_verb_that_calls_a_server_loads_its_transport_and_little_else(verb: str) -> None:
    """Decision 0342: every run of a verb pays for what it imports."""
    code = (
        "import sys\nfrom topics_server.cli import main\n"
        f"main([{verb!r}, '--help'], standalone_mode=False)\n"
        f"names = {(*HEAVY, 'pygments', 'topics_server.client.front')!r}\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=30)
    assert done.stdout.decode().splitlines()[-1] == "['httpx']"


def test_a_program_that_ran_a_verb_may_import_the_command_line_of_httpx() -> None:
    code = (
        "import sys\nfrom topics_server.cli import main\n"
        "main(['ls', '--help'], standalone_mode=False)\n"
        "assert 'httpx' in sys.modules and 'rich' not in sys.modules\n"
        "assert None not in sys.modules.values()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(alone: Topics, verb: str) -> None:
    text = alone.good(verb, "--help").out.decode()
    assert text.startswith(f"Usage: topics {verb} ")
    assert "--help" in text


@pytest.mark.parametrize("words", [["tail"], ["queue", "redrive"], ["export"], []])
def test_help_and_a_verb_print_the_same_as_the_option(alone: Topics, words: list[str]) -> None:
    asked = alone.good("help", *words)
    assert asked.out == alone.good(*words, "--help").out
    assert asked.out.decode().splitlines()[0].startswith(" ".join(["Usage: topics", *words]))


def test_help_of_an_unknown_verb_names_the_one_that_was_meant(alone: Topics) -> None:
    asked = alone("help", "tial")
    assert asked.code == 2
    assert "No such command 'tial'. Did you mean 'tail'?" in asked.err


def help_texts(command: click.Command, words: list[str]) -> Iterator[tuple[str, str]]:
    """The words and the help text of a command and of every command in it."""
    ctx = click.Context(command, info_name=" ".join(words), terminal_width=80)
    yield " ".join(words), command.get_help(ctx)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from help_texts(inner, [*words, name])


def test_examples_in_help_keep_their_lines() -> None:
    """A backspace in a text marks a block that click does not wrap; a raw docstring contains no
    backspace.
    """
    texts = dict(help_texts(main, ["topics"]))
    assert (
        "\n  topics tail -n 10 orders        the last ten, then new ones\n" in texts["topics tail"]
    )
    for words, text in texts.items():
        assert "\\b" not in text, words
        assert max(map(len, text.splitlines())) <= 90, words


def test_jobs_are_listed_and_an_unknown_one_is_wrong_usage(alone: Topics) -> None:
    listed = alone.good("jobs").out.decode()
    modules = {path.stem for path in (ROOT / "spark_jobs").glob("*")}
    named = {line.split()[0] for line in listed.splitlines() if line.startswith("  ")}
    assert len(named) == 9
    assert named <= modules
    refused = alone("jobs", "no_such_job")
    assert refused.code == 2
    assert "topic_volume" in refused.err


def test_an_unknown_verb_is_wrong_usage(alone: Topics) -> None:
    assert alone("lst").code == 2


@pytest.mark.parametrize(("word", "meant"), [("list", "ls"), ("raed", "read"), ("Ls", "ls")])
def test_an_unknown_verb_is_answered_with_the_one_that_was_meant(
    alone: Topics, word: str, meant: str
) -> None:
    assert f"No such command '{word}'. Did you mean '{meant}'?" in alone(word).err


def test_config_shows_values_and_their_sources(alone: Topics) -> None:
    alone.env = {
        "TOPICS_MAX_LIMIT": "50",
        "TOPICS_API_KEYS": "secret-1",
        "TOPICS_TOKEN": "secret-2",
        "TOPICS_PROT": "1",
    }
    ran = alone.good("config", "--port", "7")
    found = {line["name"]: (line["value"], line["source"]) for line in ran.lines}
    assert found["TOPICS_MAX_LIMIT"] == ("50", "environment")
    assert found["TOPICS_PORT"] == ("7", "flag")
    assert found["TOPICS_HOST"] == ("127.0.0.1", "default")
    assert found["TOPICS_DATA_DIR_MODE"] == ("0700", "default")
    assert found["TOPICS_COLD_DIR"] == (None, "default")
    assert found["TOPICS_API_KEYS"] == ("***", "environment")
    assert found["TOPICS_TOKEN"] == ("***", "environment")
    assert found["TOPICS_URL"] == ("http://127.0.0.1:1", "environment")
    assert "TOPICS_PROT is set, but there is no such setting" in ran.err
    assert b"secret" not in ran.out
    assert "secret" not in ran.err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TOPICS_PORT", "x", "TOPICS_PORT=x: allowed is a whole number from 0 to 65535"),
        ("TOPICS_HOST", "0.0.0.0", "TOPICS_ALLOW_INSECURE_NO_AUTH=1"),
        ("TOPICS_API_KEYS", "secret-1:x", "TOPICS_API_KEYS: entry 1 has an unknown scope"),
    ],
)
def test_serve_refuses_with_one_line_and_exit_code_2(
    alone: Topics, name: str, value: str, words: str
) -> None:
    alone.env = {name: value}
    ran = alone("serve", "--data-dir", "never")
    assert ran.code == 2
    assert words in ran.message
    assert "secret" not in ran.message
    assert not (alone.directory / "never").exists()


def test_verify_and_dump_read_a_directory_and_change_nothing(
    own: MakeServer, tmp_path: Path
) -> None:
    server = own({"TOPICS_SEGMENT_MAX_EVENTS": "100"})
    topics = Topics(server.start().url, tmp_path)
    topics.good("load", "hooks", WEBHOOKS, "--data-field", "payload")
    server.stop()
    before = contents(server.data_dir)
    verified = topics.good("verify", server.data_dir).value
    assert verified["problems"] == []
    dumped = topics.good("dump", server.data_dir)
    assert dumped.lines
    assert contents(server.data_dir) == before
    assert "no problems" in topics.good("verify", server.data_dir, "--table").err


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file's mode and bytes, by its path in the folder."""
    return {
        str(path.relative_to(folder)): (stat.S_IMODE(path.stat().st_mode), path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_verify_of_no_directory_is_wrong_usage(alone: Topics) -> None:
    assert alone("verify", "missing").code == 2
    assert alone("dump", "missing").code == 2


def test_the_walk_through_works_as_written(topics: Topics, api: Api, tmp_path: Path) -> None:
    command = tmp_path / "topics"
    command.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in COMMAND) + ' "$@"\n')
    command.chmod(0o755)
    script = WEBHOOKS.parent / "walkthrough.sh"
    topics.env = {"TOPICS": str(command), "TOPIC": "walk"}
    done = subprocess.run(
        ["sh", str(script)],
        capture_output=True,
        env=topics.environment(),
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b'"loaded":329' in done.stdout
    assert b'"stored":329' in done.stdout
    assert b'"deleted":7' in done.stdout
    assert api.state("walk").status_code == 404
