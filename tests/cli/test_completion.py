"""Shell completion: bash, zsh and fish read their scripts and complete verbs and options."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Topics
from topics_server.cli import VERBS

# Calls the completion as bash does: with the words so far, and the index of the word to complete.
ASK = """
eval "$(topics completion bash)"
COMP_WORDS=({words}) COMP_CWORD={at}
_topics_completion topics
for reply in "${{COMPREPLY[@]}}"; do echo "$reply"; done
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that contains the command `topics`."""
    script = tmp_path / "topics"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m topics_server "$@"\n')
    script.chmod(0o755)
    return tmp_path


def completed(topics: Topics, folder: Path, *words: str) -> list[str]:
    """The completions that bash offers for the last of these words."""
    text = ASK.format(words=" ".join(f"'{word}'" for word in words), at=len(words) - 1)
    env = topics.environment()
    done = subprocess.run(
        ["bash", "-c", text],
        env={**env, "PATH": f"{folder}{os.pathsep}{env['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_bash_completes_verbs_options_and_choices(alone: Topics, folder: Path) -> None:
    assert set(completed(alone, folder, "topics", "")) >= set(VERBS)
    assert set(completed(alone, folder, "topics", "qu")) == {"queue"}
    assert set(completed(alone, folder, "topics", "queue", "")) >= {"redrive", "leases", "purge"}
    assert "--durability" in completed(alone, folder, "topics", "put", "orders", "--dur")
    found = completed(alone, folder, "topics", "put", "orders", "--durability", "")
    assert set(found) == {"ephemeral", "memory", "disk", "fsync"}


def test_bash_completes_the_verbs_after_help(alone: Topics, folder: Path) -> None:
    assert completed(alone, folder, "topics", "help", "qu") == ["queue"]
    assert completed(alone, folder, "topics", "help", "queue", "red") == ["redrive"]
    assert completed(alone, folder, "topics", "help", "tail", "") == []


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}:  apt-get install {shell}")


def environment(topics: Topics, folder: Path) -> dict[str, str]:
    """The environment of a shell: the folder with `topics` comes first in `PATH`, and the home
    folder is empty.
    """
    env = topics.environment()
    home = folder / "home"
    home.mkdir(exist_ok=True)
    paths = {"PATH": f"{folder}{os.pathsep}{env['PATH']}", "XDG_CONFIG_HOME": str(home)}
    return {**env, **paths, "HOME": str(home), "TERM": "xterm"}


class Zsh:
    """A zsh of a new account on a terminal; zsh completes only in its line editor."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe("zsh", ["zsh", "-f", "-i"], {**env, "PS1": "ready> "})

    def until(self, words: str, seconds: float = 30) -> str:
        """The output of the terminal up to these words; fail if they do not appear."""
        got, shown, end = b"", "", time.monotonic() + seconds
        while words not in shown:
            assert time.monotonic() < end, f"no {words!r} in {got!r}"
            if select.select([self.terminal], [], [], 0.2)[0]:
                got += os.read(self.terminal, 4096)
            shown = re.sub(rb"\x1b\[[?\d;]*[a-zA-Z]", b"", got).decode(errors="replace")
        return shown

    def type(self, keys: str) -> None:
        """Send keys."""
        os.write(self.terminal, keys.encode())

    def close(self) -> None:
        """End the shell."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.terminal)


@pytest.fixture
def zsh(alone: Topics, folder: Path) -> Iterator[Zsh]:
    """A zsh that has read its script as docs/CLI.md says."""
    needs("zsh")
    shell = Zsh(environment(alone, folder), folder)
    try:
        shell.until("ready> ")
        shell.type('eval "$(topics completion zsh)"; echo d""one\n')
        assert "not found" not in shell.until("done")
        yield shell
    finally:
        shell.close()


def test_zsh_completes_verbs_and_choices(zsh: Zsh) -> None:
    zsh.type("topics comple\t")
    zsh.until("completion ")
    zsh.type("\x15topics put orders --durability \t")
    shown = zsh.until("memory")
    assert "disk" in shown
    assert "fsync" in shown


def test_fish_completes_verbs_options_and_choices(alone: Topics, folder: Path) -> None:
    needs("fish")
    env = environment(alone, folder)
    completions = folder / "home" / "fish" / "completions"
    completions.mkdir(parents=True)
    (completions / "topics.fish").write_bytes(alone.good("completion", "fish").out)

    def offered(line: str) -> list[str]:
        done = subprocess.run(
            ["fish", "-c", f"complete -C '{line}'"],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return [found.partition("\t")[0] for found in done.stdout.splitlines()]

    assert set(offered("topics ")) >= set(VERBS)
    assert offered("topics qu") == ["queue"]
    assert "--durability" in offered("topics put orders --dur")
    assert set(offered("topics put orders --durability ")) == {
        "ephemeral",
        "memory",
        "disk",
        "fsync",
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_accepts_the_syntax_of_its_script(alone: Topics, shell: str) -> None:
    needs(shell)
    script = alone.good("completion", shell).out
    assert b"_TOPICS_COMPLETE" in script
    subprocess.run([shell, "-n"], input=script, check=True, timeout=60)


def test_an_unknown_shell_lists_the_known_ones(alone: Topics) -> None:
    ran = alone("completion", "tcsh")
    assert ran.code == 2
    assert "bash" in ran.err
