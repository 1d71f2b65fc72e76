"""`./run release`: the files that it makes from one version, and the versions that it refuses to
release.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from tests.contract.driver import ROOT
from tests.docker.image import stages

SCRIPT: Final = ROOT / "release" / "make.py"
WITHIN_S: Final = 300.0


@pytest.fixture(scope="module")
def make() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("release_make", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_draft_holds_wheel_sdist_and_image_and_the_wheel_works(tmp_path: Path) -> None:
    output = tmp_path / "dist"
    words = [sys.executable, str(SCRIPT), "--draft", "--offline", "--output", str(output)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=WITHIN_S, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    names = {path.name for path in output.iterdir()}
    assert names >= {
        f"topics_server-{version}.tar.gz",
        f"topics_server-{version}-py3-none-any.whl",
        f"topics-server-{version}-image.tar.gz",
        "SHA256SUMS",
    }
    for line in (output / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((output / name).read_bytes()).hexdigest() == digest
        names.remove(name)
    assert names == {"SHA256SUMS"}
    # The image's context has every path that the Dockerfile copies from it.
    with tarfile.open(output / f"topics-server-{version}-image.tar.gz") as context:
        paths = [member.name.partition("/")[2] for member in context]
    for stage in stages():
        for step in stage.instructions:
            if step.word == "COPY" and not step.rest.startswith("--from"):
                for source in step.rest.split()[:-1]:
                    inside = source.removeprefix("./")
                    assert any(f"{path}/".startswith(f"{inside}/") for path in paths), source
    assert not any(path.startswith(("tests", "docs", ".")) for path in paths)
    assert (ROOT / "src/topics_server/demo/github-webhooks.jsonl.gz").read_bytes() == (
        zipfile.ZipFile(output / f"topics_server-{version}-py3-none-any.whl").read(
            "topics_server/demo/github-webhooks.jsonl.gz"
        )
    )
    # Nothing is overwritten.
    again = subprocess.run(
        words, capture_output=True, text=True, timeout=WITHIN_S, check=False, cwd=tmp_path
    )
    assert again.returncode == 1
    assert "is not empty" in again.stderr


GOOD: Final = (
    "## [Unreleased]\n\n## [1.2.0] - 2026-11-25\n\n### Added\n\n- A thing.\n\n## [1.1.0]\n"
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD, None),
        (GOOD.replace(" - 2026-11-25", ""), "needs a section"),
        (GOOD.replace("1.2.0", "1.2.1"), "needs a section"),
        (GOOD.replace("- A thing.\n", ""), "is empty"),
        (GOOD.replace("## [Unreleased]\n", "## [Unreleased]\n\n- More.\n"), "under Unreleased"),
    ],
)
def test_the_changelog_must_have_the_version(
    make: ModuleType, text: str, problem: str | None
) -> None:
    if problem is None:
        make.check_changelog(text, "1.2.0")
        return
    with pytest.raises(make.ReleaseError, match=problem):
        make.check_changelog(text, "1.2.0")


def test_both_clients_have_the_version_of_the_server(make: ModuleType, tmp_path: Path) -> None:
    assert make.version_of(ROOT)
    (tmp_path / "clients" / "js").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "clients" / "js" / "package.json").write_text(json.dumps({"version": "1.1.9"}))
    with pytest.raises(make.ReleaseError, match=r"1\.1\.9"):
        make.version_of(tmp_path)
