"""Opens the archive at a URL, and reads the options that name a moment.

The options are `--to-seq`, `--to-time` and `--base`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from topics_server.cli.connection import Failure
from topics_server.values.errors import StorageError
from topics_server.values.texts.archive_url import parse_archive_url

if TYPE_CHECKING:
    from topics_server.archive.continuous.moments import Moments, RestorePoint
    from topics_server.archive.continuous.places.shared_folder import ArchiveStore

_MS = re.compile(r"[0-9]{1,16}", re.ASCII)
_SEQ = re.compile(r"(.+)=([1-9][0-9]{0,19})", re.DOTALL)


def finder(
    to_seq: str | None, to_time: str | None, base: int | None
) -> Callable[[Moments], RestorePoint]:
    """A function that finds the moment which the options name."""
    if to_seq is not None:
        found = _SEQ.fullmatch(to_seq)
        if found is None:
            raise click.UsageError(f"--to-seq {to_seq}: allowed is TOPIC=N, N from 1 on")
        topic, seq = found[1], int(found[2])
        return lambda moments: moments.at_seq(topic, seq)
    if to_time is not None:
        ts_ms = _ms_of(to_time)
        return lambda moments: moments.at_time(ts_ms)
    if base is not None:
        part = base
        return lambda moments: moments.at_base(part)
    return lambda moments: moments.newest()


def _ms_of(text: str) -> int:
    if _MS.fullmatch(text):
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(
            f"--to-time {text}: allowed is a time like 2026-01-31T12:00:00Z, or ms since the epoch"
        ) from None
    if found.tzinfo is None:
        raise click.UsageError(f"--to-time {text}: say the zone, as in {text}Z")
    return int(found.astimezone(UTC).timestamp() * 1000)


def opened(url: str) -> ArchiveStore:
    """The archive at a URL. Raises `Failure` if there is no archive."""
    from topics_server.archive.continuous.places.opening import open_archive
    from topics_server.archive.continuous.verifying import owner_of
    from topics_server.wal.fs import OsFs

    try:
        parse_archive_url(url)
    except ValueError as error:
        raise click.UsageError(
            f"URL: {error}; allowed are file:/// and an absolute path, or s3://, "
            "gs:// or az://, a bucket and a prefix"
        ) from None
    try:
        store = open_archive(OsFs(), url)
        owner_of(store)
    except StorageError as error:
        raise Failure(str(error)) from None
    return store
