"""Makes a release: `./run release [--draft] [--offline] [--output DIR]`.

One version (pyproject.toml) makes the sdist, from it the wheel and the context of the image, the
package of the JavaScript client if npm is here, and their checksums. The wheel is then tried in an
empty environment: its command runs the demo from server to view. Nothing is published.

Before that, a release needs a clean checkout and a section of the version in CHANGELOG.md; a draft
needs neither. `--offline` lends the trial the installed dependencies of .venv instead of
downloading those of requirements.lock.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CLIENT: Final = ROOT / "clients" / "js"
IGNORED: Final = "docker/Dockerfile.dockerignore"
# What a wheel must hold beside code: a build that loses one still succeeds.
IN_WHEEL: Final = (
    "topics_server/demo/github-webhooks.jsonl.gz",
    "topics_server/demo/README.md",
    "topics_server/console/console.html",
    "topics_server/py.typed",
)
TRIED: Final = re.compile(r"^webhooks 329; triage 0 waiting, 0 in flight, 3 dead; ", re.MULTILINE)


class ReleaseError(Exception):
    """The release is not made; the message says what to do."""


def say(line: str) -> None:
    """Print a step."""
    sys.stderr.write(f"release: {line}\n")


def run(*words: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        shown = " ".join(str(word) for word in words)
        raise ReleaseError(f"{shown} failed:\n{done.stdout[-3000:]}")
    return done.stdout


def version_of(root: Path) -> str:
    """The version of pyproject.toml, which the JavaScript client must share."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    client = json.loads((root / "clients/js/package.json").read_text("utf-8"))["version"]
    if client != version:
        raise ReleaseError(f"pyproject.toml has {version}, clients/js/package.json has {client}")
    return version


def check_changelog(text: str, version: str) -> None:
    """The version has a dated section with content, and nothing is left under Unreleased."""
    sections = dict(
        re.findall(r"^## \[([^\]]+)\]([^\n]*\n(?:(?!## \[).*\n?)*)", text, re.MULTILINE)
    )
    heading, _, body = sections.get(version, "").partition("\n")
    if not re.fullmatch(r" - \d{4}-\d{2}-\d{2}", heading):
        raise ReleaseError(f"CHANGELOG.md needs a section `## [{version}] - YYYY-MM-DD`")
    if not re.search(r"^- ", body, re.MULTILINE):
        raise ReleaseError(f"the section of {version} in CHANGELOG.md is empty")
    if re.search(r"^- ", sections.get("Unreleased", ""), re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has changes under Unreleased: move them to {version}")


def check_checkout() -> None:
    """Every file is committed."""
    changed = run("git", "status", "--porcelain").splitlines()
    if changed:
        raise ReleaseError(f"{len(changed)} files are not committed, such as {changed[0][3:]}")


def build(output: Path, version: str) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", output)
    sdist = output / f"topics_server-{version}.tar.gz"
    wheel = output / f"topics_server-{version}-py3-none-any.whl"
    for path in (sdist, wheel):
        if not path.exists():
            raise ReleaseError(f"the build made no {path.name}")
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in IN_WHEEL if name not in names]
    if missing:
        raise ReleaseError(f"the wheel has no {missing[0]}")
    return sdist, wheel


def image_context(sdist: Path, output: Path, version: str) -> Path:
    """What `docker build -f docker/Dockerfile` reads, taken from the sdist."""
    lines = (ROOT / IGNORED).read_text("utf-8").splitlines()
    allowed = [line[1:] for line in lines if line.startswith("!")]
    context = output / f"topics-server-{version}-image.tar.gz"
    found: set[str] = set()
    with tarfile.open(sdist) as source, tarfile.open(context, "w:gz") as made:
        for member in source:
            path = member.name.partition("/")[2]
            name = next((each for each in allowed if f"{path}/".startswith(f"{each}/")), None)
            if name is None and path not in ("docker/Dockerfile", IGNORED):
                continue
            found.add(name or path)
            made.addfile(member, source.extractfile(member) if member.isfile() else None)
    missing = {*allowed, "docker/Dockerfile", IGNORED} - found
    if missing:
        raise ReleaseError(f"the sdist has no {min(missing)}, which the image needs")
    return context


def pack_client(output: Path) -> Path | None:
    """The package of the JavaScript client; None without npm."""
    npm = shutil.which("npm")
    if npm is None:
        say("no npm here: the JavaScript client is not packed")
        return None
    [packed] = json.loads(run(npm, "pack", "--silent", "--json", CLIENT, cwd=output))
    return output / str(packed["filename"])


def try_wheel(wheel: Path, version: str, *, is_offline: bool) -> None:
    """Install the wheel in an empty environment and run its demo."""
    with tempfile.TemporaryDirectory(prefix="topics-release-") as name:
        folder = Path(name)
        run(sys.executable, "-m", "venv", folder / "env")
        python = folder / "env" / "bin" / "python"
        pip: list[str | Path] = [
            python,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--no-input",
            "install",
        ]
        if not is_offline:
            run(*pip, "--quiet", "--no-deps", "--require-hashes", "-r", ROOT / "requirements.lock")
        run(*pip, "--quiet", "--no-deps", "--no-index", wheel)
        if is_offline:
            # A folder in a .pth file is searched, and its own .pth files are not read: the
            # checkout that is installed there stays unseen.
            [site] = (folder / "env" / "lib").glob("python3*/site-packages")
            (site / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TOPICS_", "PYTHON"))}
        code = "import topics_server; print(topics_server.__file__)"
        where = run(python, "-c", code, cwd=folder, env=env).strip()
        if not where.startswith(str(folder)):
            raise ReleaseError(f"the trial used {where} and not the wheel")
        topics = folder / "env" / "bin" / "topics"
        told = run(topics, "--version", cwd=folder, env=env).strip()
        if not told.endswith(f" {version}"):
            raise ReleaseError(f"the wheel says {told!r} instead of {version}")
        words: list[str | Path] = ["demo", "--once", "--port", "0", "--data-dir", folder / "demo"]
        shown = run(topics, *words, cwd=folder, env=env)
        if not TRIED.search(shown):
            raise ReleaseError(f"the demo of the wheel said:\n{shown}")


def main() -> int:
    """Make the release; the exit code is the result."""
    parser = argparse.ArgumentParser(prog="./run release", description=__doc__)
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    try:
        version = version_of(ROOT)
        if not options.draft:
            check_changelog((ROOT / "CHANGELOG.md").read_text("utf-8"), version)
            check_checkout()
        output = options.output.resolve()
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise ReleaseError(f"{output} is not empty: remove it, or name another --output")
        say(f"building {version}")
        sdist, wheel = build(output, version)
        made = [sdist, wheel, image_context(sdist, output, version), pack_client(output)]
        say("trying the wheel in an empty environment")
        try_wheel(wheel, version, is_offline=options.offline)
        files = [path for path in made if path is not None]
        sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
        (output / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    except ReleaseError as error:
        say(str(error))
        return 1
    say(f"{version} is in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
