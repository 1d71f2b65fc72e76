"""The archive of classes: it is whole and in use, or it is not used at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from spark_jobs.session import NO_JAVA, find_java
from tests.spark import class_archive
from tests.spark.conftest import HAS_SPARK, INSTALL

KEY = "0123456789abcdef"


@pytest.mark.timeout(900)
def test_spark_takes_its_classes_from_the_archive(tmp_path: Path) -> None:
    """A file that is no archive, or a shorter one, is noticed before it gets its name."""
    if not HAS_SPARK:
        pytest.skip(f"PySpark is not installed; {INSTALL}")
    key = class_archive.key_of()
    java = find_java()
    if key is None or java is None:
        pytest.skip(NO_JAVA)
    shared = [str(Path(java, "bin", "java")), "-Xshare:on", "-version"]
    if subprocess.run(shared, capture_output=True, check=False).returncode != 0:
        pytest.skip("this Java came without an archive of its own classes")
    archive = class_archive.make(key)
    assert archive is not None
    assert class_archive.is_mapped(archive)
    assert class_archive.use() == archive
    assert str(archive) in class_archive.java_options()
    assert not any(str(archive) in value for value in class_archive.plain_environment().values())
    other = tmp_path / "other.jsa"
    other.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    assert not class_archive.is_mapped(other)


def test_only_an_archive_of_the_size_in_its_name_is_found(tmp_path: Path) -> None:
    assert class_archive.find(KEY, tmp_path) is None
    path = tmp_path / f"{KEY}-8.jsa"
    path.write_bytes(b"12345678")
    (tmp_path / "new.jsa").write_bytes(b"1")
    assert class_archive.find(KEY, tmp_path) == path
    assert class_archive.find(KEY[::-1], tmp_path) is None
    os.truncate(path, 7)
    assert class_archive.find(KEY, tmp_path) is None


def test_without_a_java_nothing_is_made_or_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(class_archive, "key_of", lambda: None)
    before = dict(os.environ)
    assert class_archive.start_making() is None
    assert class_archive.use() is None
    assert dict(os.environ) == before


def test_a_program_that_fails_leaves_no_archive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may have written a part of the file."""

    def fail(_command: list[str], folder: Path, _options: str) -> int:
        (folder / "new.jsa").write_bytes(b"a part")
        return 1

    monkeypatch.setattr(class_archive, "_run", fail)
    (tmp_path / "older-1.jsa").write_bytes(b"1")
    assert class_archive.make(KEY, tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "lock"]
