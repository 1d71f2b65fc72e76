"""The folder of a view: lists its files, and removes it.

Runs in the server, on a thread: called by `judge`, `view` and `service`. This module needs no
SQLite.
"""

from __future__ import annotations

import os
from pathlib import Path


def files_in(directory: Path) -> list[tuple[int, str]]:
    """*Blocking.* A view's files by number; empty if there is no such folder."""
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
    """*Blocking.* Remove a view's folder if it is empty."""
    try:
        directory.rmdir()
    except OSError:
        pass


def tidy(directory: Path, gone: set[str]) -> None:
    """*Blocking.* Remove the folders of deleted views; the parent folder may not exist."""
    try:
        folders = list(directory.iterdir())
    except FileNotFoundError:
        return
    for folder in folders:
        if folder.name not in gone:
            continue
        for file in folder.iterdir():
            # Remove only files that the database makes.
            if file.name.split(".")[0].isdigit() and ".db" in file.name:
                file.unlink()
        remove_directory(folder)
