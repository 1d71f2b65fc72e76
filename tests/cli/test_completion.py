"""Shell completion: the scripts are made, and a bash that reads one completes verbs and options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Topics
from topics_server.cli import VERBS

# As bash completes: the words so far, and which of them is completed.
ASK = """
eval "$(topics completion bash)"
COMP_WORDS=({words}) COMP_CWORD={at}
_topics_completion topics
for reply in "${{COMPREPLY[@]}}"; do echo "$reply"; done
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the command `topics` in it."""
    script = tmp_path / "topics"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m topics_server "$@"\n')
    script.chmod(0o755)
    return tmp_path


def completed(topics: Topics, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_reads_its_script(alone: Topics, shell: str) -> None:
    script = alone.good("completion", shell).out
    assert b"_TOPICS_COMPLETE" in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, check=True, timeout=60)


def test_another_shell_is_told_which_there_are(alone: Topics) -> None:
    ran = alone("completion", "tcsh")
    assert ran.code == 2
    assert "bash" in ran.err
