"""Takes each guard of the table out of a copy of the source and runs the tests beside it.

`./run guards [WORD ...]`: all guards, or those whose rule or file contains one of the words. It
prints a line for each guard, and exits with 1 if the tests of a guard pass without it. `--write`
writes the table of docs/GUARDS.md from a run of all. That takes about twenty minutes:
`.ci/run` does not do it. Tests fail for other reasons too, so those of each guard first have to
pass on the unchanged copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.guards.guard import Guard
from tests.guards.table import GUARDS

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "GUARDS.md"
_HEAD: Final = "| rule | file | taken out | the test that fails |\n|---|---|---|---|\n"
_FAILED: Final = 1  # pytest's exit code for failed tests
_FAILURE: Final = re.compile(r"^FAILED tests/(\S+?)(?:\[| - |$)", re.MULTILINE)
WITHIN_S: Final = 600


def failures(guard: Guard, source: Path) -> list[str]:
    """The tests that fail without this guard; `source`: a copy of `src` to change."""
    path = source / "topics_server" / guard.file
    text = path.read_text("utf-8")
    assert text.count(guard.old) == 1, f"{guard.file}: {guard.old}"
    path.write_text(text.replace(guard.old, guard.new), "utf-8")
    try:
        found = run(guard, source)
    finally:
        path.write_text(text, "utf-8")
    if found.returncode not in (0, _FAILED):
        raise SystemExit(f"{guard.file}: the tests could not run\n{found.stdout[-4000:]}")
    return _FAILURE.findall(found.stdout)


def run(guard: Guard, source: Path) -> subprocess.CompletedProcess[str]:
    """Run the tests of a guard on this source, to the first failure."""
    words = [f"tests/{name}" for name in guard.tests.split()]
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*pytest, "--hypothesis-profile=ci", "-m", "not crash", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def cells(guard: Guard) -> str:
    """The first three cells of a guard's row in the page."""
    taken_out = " ".join(guard.old.split()).replace("|", "\\|")
    return f"{guard.rule} | `{guard.file}` | `{taken_out}`"


def write_page(rows: list[str]) -> None:
    """Replace the table of the page, which is its end."""
    intro = PAGE.read_text("utf-8").partition(_HEAD)[0]
    PAGE.write_text(intro + _HEAD + "".join(rows), "utf-8")


def main(words: list[str]) -> int:
    """Check the guards of these words; the exit code."""
    is_written = "--write" in words
    words = [word for word in words if word != "--write"]
    chosen = [
        guard
        for guard in GUARDS
        if not words or any(word in guard.rule or word in guard.file for word in words)
    ]
    unnoticed = 0
    rows: list[str] = []
    sound: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for guard in chosen:
            if guard.tests not in sound:
                found = run(guard, source)
                if found.returncode:
                    raise SystemExit(f"{guard.tests}: red with all guards\n{found.stdout[-4000:]}")
                sound.add(guard.tests)
            red = failures(guard, source)
            unnoticed += not red
            test = red[0] if red else "NO TEST FAILS"
            print(f"{guard.file}: {guard.rule}: {test}", flush=True)
            rows.append(f"| {cells(guard)} | `{test}` |\n")
    print(f"{len(chosen)} guards taken out, {unnoticed} unnoticed")
    if is_written and not words and not unnoticed:
        write_page(rows)
    return 1 if unnoticed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
