"""Builds the Dockerfile without a container engine: runs its steps unchanged, in folders of the
test.

Owns parsing `docker/Dockerfile` into stages of instructions and executing them: `RUN` by a shell,
`COPY` from the repository (through its ignore file) or from a stage. An absolute path of the image
becomes one below a test folder; everything else in a line stays unchanged, so the test runs what an
engine would run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from tests.contract.driver import ROOT

DOCKERFILE: Final = ROOT / "docker" / "Dockerfile"
IGNORED: Final = ROOT / "docker" / "Dockerfile.dockerignore"
# The folders of the image that instructions name.
PLACES: Final = ("/build", "/wheels", "/builder", "/opt/topics", "/data")
PYTHON: Final = f"python3.{sys.version_info.minor}"
STEP_WITHIN_S: Final = 500.0


class Instruction(NamedTuple):
    """One line of a Dockerfile."""

    word: str
    rest: str


class Stage(NamedTuple):
    """From one `FROM` to the next."""

    base: str
    name: str
    instructions: list[Instruction]


def stages() -> list[Stage]:
    """Parse the Dockerfile."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    found: list[Stage] = []
    for line in lines:
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base, name, []))
        else:
            found[-1].instructions.append(Instruction(word, rest.strip()))
    return found


def settings_of(stage: Stage) -> dict[str, str]:
    """The variables of `ENV`."""
    pairs = [shlex.split(i.rest) for i in stage.instructions if i.word == "ENV"]
    return dict(pair.split("=", 1) for line in pairs for pair in line)


def only(stage: Stage, word: str) -> str:
    """The arguments of the only instruction of this kind."""
    (found,) = [i.rest for i in stage.instructions if i.word == word]
    return found


class Built:
    """The test folders that stand for the image."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.build_stage, self.final_stage = stages()
        # A `python` like in an image: pip and no other package.
        root.mkdir(parents=True)
        self.base = reachable_python(root / "python")
        made = [str(self.base / "bin" / PYTHON), "-m", "venv", str(root / "clean")]
        subprocess.run(made, check=True, env=self.environment({}), timeout=STEP_WITHIN_S)

    def environment(self, given: dict[str, str]) -> dict[str, str]:
        """The environment that lets a copied interpreter find its library, together with
        `given`.
        """
        return {"LD_LIBRARY_PATH": str(self.base / "lib"), **given}

    def place(self, path: str) -> Path:
        """The test path of a path in the image."""
        return self.root / path.lstrip("/")

    def rewritten(self, line: str) -> str:
        """A shell line with the image's folders replaced."""
        names = "|".join(map(re.escape, sorted(PLACES, key=len, reverse=True)))
        return re.sub(rf"(?<![\w./-])({names})(?=[/\s]|$)", lambda m: str(self.place(m[1])), line)

    def run(self, line: str) -> None:
        """Execute one `RUN`."""
        line = self.rewritten(line)
        if os.geteuid() != 0:
            # Only root may change a file's owner.
            line = re.sub(r" -o \d+ -g \d+", "", line)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        path = f"{self.root}/clean/bin:/usr/local/bin:/usr/bin:/bin"
        done = subprocess.run(
            ["/bin/sh", "-ec", line],
            cwd=self.place("/build"),
            env=self.environment({**kept, "PATH": path}),
            capture_output=True,
            text=True,
            timeout=STEP_WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"RUN {line}\n{done.stdout}{done.stderr}"

    def copy(self, rest: str) -> None:
        """Execute one `COPY` from the repository, without the ignored files."""
        *sources, target = rest.split()
        for source in sources:
            assert is_sent(source), f"COPY {source}: {IGNORED.name} keeps it back"
            there = self.place("/build") / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, there, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                there.mkdir(exist_ok=True)
                shutil.copy(ROOT / source, there)

    def build(self) -> None:
        """Execute every step of both stages."""
        assert only(self.build_stage, "WORKDIR") == "/build"
        self.place("/build").mkdir()
        for word, rest in self.build_stage.instructions:
            if word == "RUN":
                self.run(rest)
            elif word == "COPY":
                self.copy(rest)
            else:
                assert word == "WORKDIR", f"{word} is not known here"
        for word, rest in self.final_stage.instructions:
            if word == "RUN":
                self.run(rest)
            elif word == "COPY":
                source, target = rest.removeprefix("--from=build ").split()
                # The file is already there, because both stages are one folder here.
                assert source == target
                assert self.place(target).is_dir()


def reachable_python(copy: Path) -> Path:
    """The prefix of our interpreter, or of a copy if only root could start ours."""
    base = Path(sys.base_prefix)
    if all(folder.stat().st_mode & 0o001 for folder in (base, *base.parents)):
        return base
    library = Path("lib") / PYTHON
    left_out = shutil.ignore_patterns("test", "site-packages", "__pycache__", "idlelib", "config-*")
    shutil.copytree(base / library, copy / library, symlinks=True, ignore=left_out)
    for shared in (base / "lib").glob("libpython*"):
        shutil.copy(shared, copy / "lib")
    (copy / "bin").mkdir()
    shutil.copy(base / "bin" / PYTHON, copy / "bin")
    return copy


def is_sent(source: str) -> bool:
    """Whether the ignore file includes a file or folder of the repository."""
    lines = [line for line in IGNORED.read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*", "nothing is sent but what is named"
    return f"!{source}" in lines
