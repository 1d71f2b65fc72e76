"""`topics restore`: makes a data directory from a backup, or as of a moment of an archive.

Exit code 0: DIR is ready for `topics serve`. 1: refused or damaged; DIR then holds no store.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from topics_server.cli.backups.archive_source import finder, opened
from topics_server.cli.connection import Failure
from topics_server.cli.output import format_options, note, show_object
from topics_server.values.errors import StorageError
from topics_server.values.texts.archive_url import is_url

if TYPE_CHECKING:
    from topics_server.archive.continuous.moments import Moments, RestorePoint


@click.command("restore")
@click.argument("source", metavar="FOLDER|URL")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option(
    "--backup",
    "number",
    type=click.IntRange(1),
    metavar="NUMBER",
    help="Of a FOLDER: this backup. Default: the newest one.",
)
@click.option("--to-seq", metavar="TOPIC=N", help="Of an archive: up to this record's append.")
@click.option(
    "--to-time",
    metavar="TIME",
    help="Of an archive: up to this time of the server, 2026-01-31T12:00:00Z or ms.",
)
@click.option(
    "--base", type=click.IntRange(1), metavar="NUMBER", help="Of an archive: this base as it is."
)
@click.option(
    "--topics",
    metavar="NAMES",
    help="Of an archive: only these topics, comma-separated; * stands for any characters.",
)
@click.option(
    "--skip",
    "skipped",
    type=click.IntRange(1),
    metavar="NUMBER",
    multiple=True,
    help="Do not ask this backup or part, which cannot be read. May be given several times.",
)
@format_options
def command(
    source: str,
    directory: str,
    number: int | None,
    to_seq: str | None,
    to_time: str | None,
    base: int | None,
    topics: str | None,
    skipped: tuple[int, ...],
    as_json: bool,
) -> None:
    """Make the data directory DIR, a new or empty folder, from a backup or an archive.

    FOLDER holds backups, URL names a continuous archive. DIR becomes a new store with a new id. It
    has the topics, records, deletes, queues, routers, producers and sessions of the backup. New
    records get seqs behind all seqs in any backup or part; readers get the seqs between as damaged.
    Views are built anew. Without an option the newest backup or moment is restored. An unreadable
    backup or part stops the restore, because it may contain seqs that the others do not have. With
    --skip these seqs may be assigned again.
    """
    of_archive = {"--to-seq": to_seq, "--to-time": to_time, "--base": base}
    given = [name for name, value in of_archive.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} name two moments: give one")
    if is_url(source):
        if number is not None:
            raise click.UsageError("--backup is for a FOLDER; an archive has --base")
        find = finder(to_seq, to_time, base)
        made = _from_archive(source, directory, find, topics, skipped)
    else:
        if given or topics is not None:
            raise click.UsageError(f"{(*given, '--topics')[0]} is for the URL of an archive")
        if not Path(source).is_dir():
            raise click.UsageError(f"{source} is neither a folder nor the URL of an archive")
        made = _from_folder(source, directory, number, skipped)
    show_object(msgspec.json.encode(made), as_json=as_json)
    note(f"start it with: topics serve --data-dir {directory}")


def _from_folder(
    folder: str, directory: str, number: int | None, skipped: tuple[int, ...]
) -> object:
    from topics_server.archive.object_store import FolderStore
    from topics_server.archive.restore import restore
    from topics_server.wal.fs import OsFs

    fs = OsFs()
    try:
        store = FolderStore.open(fs, folder, write=False)
        return restore(fs, store, directory, number, skipped=skipped)
    except StorageError as error:
        raise Failure(str(error)) from None


def _from_archive(
    url: str,
    directory: str,
    find: Callable[[Moments], RestorePoint],
    topics: str | None,
    skipped: tuple[int, ...],
) -> object:
    from topics_server.archive.continuous.restoring import restore_moment
    from topics_server.wal.fs import OsFs

    store = opened(url)
    is_wanted = None if topics is None else _wanted(topics)
    try:
        return restore_moment(OsFs(), store, directory, find, is_wanted=is_wanted, skipped=skipped)
    except StorageError as error:
        raise Failure(str(error)) from None


def _wanted(topics: str) -> Callable[[str], bool]:
    """Whether a name matches one of the patterns, in which * stands for any characters."""
    patterns = [
        "".join("*" if char == "*" else f"[{char}]" if char in "[?" else char for char in part)
        for part in filter(None, (part.strip() for part in topics.split(",")))
    ]
    if not patterns:
        raise click.UsageError("--topics: name at least one topic")
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)
