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

# Calls the completion as bash does: with the words so far, and the index of the word to complete. A
# mark ends each answer.
READ = 'eval "$(topics completion bash)"'
ASK = """
COMP_WORDS=({words}) COMP_CWORD={at} COMPREPLY=()
_topics_completion topics
for reply in "${{COMPREPLY[@]}}"; do echo "$reply"; done
echo {mark}
"""
MARK = "== end =="


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that contains the command `topics`."""
    script = tmp_path / "topics"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m topics_server "$@"\n')
    script.chmod(0o755)
    return tmp_path


def completed(topics: Topics, folder: Path, *lines: str) -> list[list[str]]:
    """What one bash that has read its script offers for the last word of each of these lines."""
    text = READ
    for line in lines:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        text += ASK.format(words=quoted, at=len(words) - 1, mark=MARK)
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
    return answers(done.stdout, len(lines))


def answers(printed: str, count: int) -> list[list[str]]:
    """The lines before each mark."""
    *found, rest = printed.split(f"{MARK}\n")
    assert (len(found), rest) == (count, "")
    return [each.splitlines() for each in found]


def test_bash_completes_verbs_options_and_choices(alone: Topics, folder: Path) -> None:
    verbs, started, verbs_of_queue, options, choices = completed(
        alone,
        folder,
        "topics ",
        "topics qu",
        "topics queue ",
        "topics put orders --dur",
        "topics put orders --durability ",
    )
    assert set(verbs) >= set(VERBS)
    assert set(started) == {"queue"}
    assert set(verbs_of_queue) >= {"redrive", "leases", "purge"}
    assert "--durability" in options
    assert set(choices) == {"ephemeral", "memory", "disk", "fsync"}


def test_bash_completes_the_verbs_after_help(alone: Topics, folder: Path) -> None:
    lines = ("topics help qu", "topics help queue red", "topics help tail ")
    assert completed(alone, folder, *lines) == [["queue"], ["redrive"], []]


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

    lines = ("topics ", "topics qu", "topics put orders --dur", "topics put orders --durability ")
    done = subprocess.run(
        ["fish", "-c", "".join(f"complete -C '{line}'\necho {MARK}\n" for line in lines)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    verbs, started, options, choices = (
        [each.partition("\t")[0] for each in found] for found in answers(done.stdout, len(lines))
    )
    assert set(verbs) >= set(VERBS)
    assert started == ["queue"]
    assert "--durability" in options
    assert set(choices) == {"ephemeral", "memory", "disk", "fsync"}


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
