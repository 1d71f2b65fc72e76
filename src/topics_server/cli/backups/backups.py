"""`topics backups`: ls, verify, drill and prune of a backup folder.

Works on the folder itself, also while a server runs. Exit code 1: a problem was found, or the
command was refused.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
import msgspec

from topics_server.cli.backups.drill import drill
from topics_server.cli.connection import Failure
from topics_server.cli.output import confirm, format_options, note, show_table, write_line
from topics_server.values.errors import StorageError

if TYPE_CHECKING:
    from topics_server.archive.format import BackupFacts
    from topics_server.archive.repository import Repository

_COLUMNS = ("backup", "made", "topics", "segments", "segment_bytes", "last_lsn", "damaged")


@click.group("backups", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """List, verify, try and prune the backups in a folder."""


command.add_command(drill)


@command.command("ls")
@click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False))
@format_options
@click.pass_context
def list_backups(ctx: click.Context, folder: str, as_json: bool) -> None:
    """List the backups in FOLDER, oldest first. Exit code 1: one of them cannot be read."""
    found: list[BackupFacts] = []
    problems: list[str] = []
    try:
        repository = _opened(folder, problems)
        for number in repository.numbers():
            try:
                found.append(repository.facts(number))
            except StorageError as error:
                # A backup whose number is gone was pruned meanwhile.
                if number in repository.numbers():
                    problems.append(str(error))
    except StorageError as error:
        raise Failure(str(error)) from None
    rows = [dict(zip(_COLUMNS, _row(facts), strict=True)) for facts in found]
    if as_json:
        for row in rows:
            write_line(msgspec.json.encode(row))
    else:
        show_table(_COLUMNS, [tuple(map(str, row.values())) for row in rows], numbers=_COLUMNS)
    for problem in problems:
        note(f"problem: {problem}")
    ctx.exit(1 if problems else 0)


@command.command("verify")
@click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False))
@click.option("--backup", "number", type=click.IntRange(1), metavar="NUMBER", help="Default: all.")
@format_options
@click.pass_context
def verify(ctx: click.Context, folder: str, number: int | None, as_json: bool) -> None:
    """Read every byte of the backups in FOLDER and compare it with its checksum."""
    try:
        # `verify` reports a damaged owner of the folder itself.
        repository = _opened(folder, [])
        if number is not None and number not in repository.numbers():
            raise Failure(f"{folder}: there is no backup {number}")
        found = repository.verify(None if number is None else [number])
    except StorageError as error:
        raise Failure(str(error)) from None
    if as_json:
        write_line(msgspec.json.encode(found))
    else:
        for problem in found.problems:
            note(f"problem: {problem}")
        count = f"{len(found.problems)} problems" if found.problems else "no problems"
        note(f"{found.backups} backups, {count}")
    ctx.exit(1 if found.problems else 0)


@command.command("prune")
@click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--keep",
    required=True,
    metavar="RULES",
    help="So many of the newest, or one for each of so many days, weeks, months: 7d,4w,12m.",
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@format_options
def prune(folder: str, keep: str, yes: bool, as_json: bool) -> None:
    """Remove all backups in FOLDER that no rule keeps, and the segments that only they need.

    The newest backup always stays. Only pruning removes the payloads of deleted records from
    FOLDER: they stay there as long as a backup holds their segment.
    """
    from topics_server.archive.object_store import FolderStore
    from topics_server.archive.repository import Repository
    from topics_server.archive.retention import kept, parse_rules
    from topics_server.wal.fs import OsFs

    try:
        rules = parse_rules(keep)
    except ValueError as error:
        raise click.UsageError(f"--keep: {error}") from None
    store = None
    try:
        _opened(folder)
        store = FolderStore.open(OsFs(), folder, write=True)
        repository = Repository(store)
        try:
            found = [repository.facts(number) for number in repository.numbers()]
        except StorageError as error:
            raise Failure(
                f"nothing is removed, because the segments of this backup are not known: {error}. "
                "If it is lost for good, remove its folder by hand"
            ) from None
        if not found:
            raise Failure(f"{folder}: there is no backup")
        keeps = kept([(facts.number, facts.ts_ms) for facts in found], rules)
        gone = [facts.number for facts in found if facts.number not in keeps]
        if gone:
            numbers = ", ".join(map(str, gone))
            confirm(f"Remove {len(gone)} of {len(found)} backups for good: {numbers}?", yes=yes)
        pruned = repository.prune(keeps)
    except StorageError as error:
        raise Failure(str(error)) from None
    finally:
        if store is not None:
            store.close()
    if as_json:
        write_line(msgspec.json.encode(pruned))
    else:
        note(f"kept: {', '.join(map(str, pruned.kept))}")
        note(f"removed: {', '.join(map(str, pruned.removed)) or 'none'}")
        note(f"{pruned.segments} files of segments, {pruned.bytes} bytes")


def _opened(folder: str, problems: list[str] | None = None) -> Repository:
    """The backups in a folder. Adds a damaged owner to `problems`, or raises without `problems`."""
    from topics_server.archive.object_store import FolderStore
    from topics_server.archive.repository import Repository
    from topics_server.wal.fs import OsFs

    repository = Repository(FolderStore.open(OsFs(), folder, write=False))
    try:
        repository.owner()
    except StorageError as error:
        # A folder without any backup is probably the wrong one.
        if problems is None or not repository.numbers():
            raise
        problems.append(str(error))
    return repository


def _row(facts: BackupFacts) -> tuple[int | str, ...]:
    return (
        facts.number,
        datetime.fromtimestamp(facts.ts_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        facts.topics,
        facts.segments,
        facts.segment_bytes,
        facts.last_lsn,
        len(facts.damaged_segments),
    )
