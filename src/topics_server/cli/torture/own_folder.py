"""The folder of a torture run: it must be empty, and the files of the run are removed from it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import click

from topics_server.cli.connection import Failure
from topics_server.values.limits import MIB

DATA: Final = "data"
# Everything that a run makes in its folder, besides the store.
_FILES: Final = ("port", "server.log", "sync.tmp")


class OwnFolder:
    """The folder while a run uses it."""

    def __init__(self, path: Path) -> None:
        """Create the folder, or use an empty one. Raises `UsageError` and `Failure`."""
        self.path = path
        self._is_made = not path.exists()
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            if any(path.iterdir()):
                raise click.UsageError(
                    f"{path} is not empty: name a new folder, or an empty one, on the disk to test"
                )
        except (FileExistsError, NotADirectoryError):
            raise click.UsageError(f"{path} is not a folder") from None
        except OSError as error:
            raise Failure(f"{path}: {error.strerror or error}") from None

    @property
    def data(self) -> Path:
        """The data directory of the server."""
        return self.path / DATA

    @property
    def sync_file(self) -> Path:
        """The file whose syncs are timed."""
        return self.path / "sync.tmp"

    def used_bytes(self) -> int:
        """The space that the run takes on the disk."""
        total = 0
        for path in [*self.data.rglob("*"), *(self.path / name for name in _FILES)]:
            try:
                total += path.lstat().st_blocks * 512
            except OSError:
                continue  # removed meanwhile
        return total

    def free_bytes(self) -> int:
        """The space that is free on the disk."""
        return shutil.disk_usage(self.path).free

    def require(self, size_limit: int) -> None:
        """Refuse a disk that would be nearly full. Raises `Failure`."""
        usage = shutil.disk_usage(self.path)
        kept = min(1024 * MIB, usage.total // 20)
        if usage.free < size_limit + kept:
            raise Failure(
                f"{self.path}: {usage.free // MIB} MiB are free, and a run needs "
                f"{size_limit // MIB} MiB and leaves {kept // MIB} MiB: make room, or lower "
                "--size-limit"
            )

    def clean_up(self) -> None:
        """Remove the files of the run.

        Also remove the folder, if the run created it and it is empty.
        """
        shutil.rmtree(self.data, ignore_errors=True)
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        if self._is_made and not any(self.path.iterdir()):
            self.path.rmdir()
