"""The folder of a view: which files it has, and how it goes.

Runs in the server, on a thread: called by `judge`, `view` and `service`. It needs no SQLite.
"""

from __future__ import annotations

import os
from pathlib import Path


def files_in(directory: Path) -> list[tuple[int, str]]:
    """*Blocking.* A view's files by number; none if there is no such folder."""
    found: list[tuple[int, str]] = []
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    for name in names:
        stem, _, kind = name.partition(".")
        if kind == "db" and stem.isdigit():
            found.append((int(stem), str(directory / name)))
    return sorted(found)


def remove_directory(directory: Path) -> None:
    """*Blocking.* Remove a view's folder, if nothing is left in it."""
    try:
        directory.rmdir()
    except OSError:
        pass


def tidy(directory: Path, gone: set[str]) -> None:
    """*Blocking.* Remove the folders of views that are gone; there may be no folder at all."""
    try:
        folders = list(directory.iterdir())
    except FileNotFoundError:
        return
    for folder in folders:
        if folder.name not in gone:
            continue
        for file in folder.iterdir():
            # Only what the database makes there.
            if file.name.split(".")[0].isdigit() and ".db" in file.name:
                file.unlink()
        remove_directory(folder)
