"""The place that a URL names: a folder, or a bucket if obstore is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from topics_server.archive.continuous.places import opening
from topics_server.archive.continuous.places.opening import open_archive, refuse_place
from topics_server.archive.continuous.places.shared_folder import SharedFolder
from topics_server.values.errors import StartRefused, StorageError
from topics_server.wal.fs import OsFs

FS = OsFs()


def test_a_folder_is_opened_and_never_made(tmp_path: Path) -> None:
    url = (tmp_path / "our archive").as_uri()
    with pytest.raises(StorageError, match="is its disk mounted"):
        open_archive(FS, url)
    (tmp_path / "our archive").mkdir()
    store = open_archive(FS, url, bytes_per_s=5)
    assert isinstance(store, SharedFolder)
    assert (store.root, store.bytes_per_s) == (str(tmp_path / "our archive"), 5)


def test_a_folder_of_the_store_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "archive").mkdir(parents=True)
    for place in (data, data / "archive", tmp_path):
        with pytest.raises(StartRefused, match=r"the archive and .* inside the other"):
            refuse_place(FS, place.as_uri(), str(data), None)
    refuse_place(FS, (tmp_path / "archive").as_uri(), str(data), None)


def test_a_bucket_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "is_installed", lambda: False)
    for scheme in ("s3", "gs", "az"):
        with pytest.raises(StartRefused, match=rf"{scheme}:// needs the package obstore"):
            refuse_place(FS, f"{scheme}://bucket/prefix", "data", None)
    monkeypatch.setattr(opening, "is_installed", lambda: True)
    refuse_place(FS, "s3://bucket/prefix", "data", None)
