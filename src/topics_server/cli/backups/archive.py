"""`topics archive`: ls, verify, drill, prune and unlock of a continuous archive.

Works on the archive itself, also while a server runs. Exit code 1: a problem was found, or the
command was refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from topics_server.cli.backups.archive_source import opened
from topics_server.cli.backups.drill import drill_archive
from topics_server.cli.connection import Failure
from topics_server.cli.output import confirm, format_options, note, show_table, write_line
from topics_server.values.errors import StorageError

if TYPE_CHECKING:
    from topics_server.archive.continuous.bases import ArchiveBase
    from topics_server.archive.continuous.history import ArchiveHistory

_COLUMNS = ("base", "made", "last_lsn", "topics", "segments", "segment_bytes", "until", "until_lsn")
_URL = click.argument("url", metavar="URL")


@click.group("archive", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """List, verify, try and prune a continuous archive (TOPICS_ARCHIVE_URL)."""


command.add_command(drill_archive)


@command.command("ls")
@_URL
@format_options
@click.pass_context
def list_archive(ctx: click.Context, url: str, as_json: bool) -> None:
    """List the bases in the archive at URL, oldest first.

    From each base, every moment up to the time `until` can be restored. Exit code 1: the archive
    cannot be read completely.
    """
    from topics_server.archive.continuous.bases import ArchiveBases
    from topics_server.archive.continuous.history import ArchiveHistory

    store = opened(url)
    history = ArchiveHistory(store)
    try:
        bases, problems = ArchiveBases(store, history).all()
        rows = _rows(history.numbers(), bases, history, problems)
    except StorageError as error:
        raise Failure(str(error)) from None
    if as_json:
        for row in rows:
            write_line(msgspec.json.encode(row))
    else:
        show_table(_COLUMNS, [tuple(map(str, row.values())) for row in rows], numbers=_COLUMNS)
    for problem in problems:
        note(f"problem: {problem}")
    ctx.exit(1 if problems else 0)


@command.command("verify")
@_URL
@format_options
@click.pass_context
def verify(ctx: click.Context, url: str, as_json: bool) -> None:
    """Read every byte of the archive at URL and compare it with its checksum."""
    from topics_server.archive.continuous.verifying import verify_archive

    try:
        found = verify_archive(opened(url))
    except StorageError as error:
        raise Failure(str(error)) from None
    if as_json:
        write_line(msgspec.json.encode(found))
    else:
        for problem in found.problems:
            note(f"problem: {problem}")
        count = f"{len(found.problems)} problems" if found.problems else "no problems"
        note(f"{found.bases} bases, {found.parts} parts in {found.stretches} stretches, {count}")
    ctx.exit(1 if found.problems else 0)


@command.command("prune")
@_URL
@click.option(
    "--keep",
    required=True,
    metavar="RULES",
    help="So many of the newest bases, or one for each of so many days, weeks, months: 7d,4w,12m.",
)
@click.option(
    "--skip",
    "skipped",
    type=click.IntRange(1),
    metavar="NUMBER",
    multiple=True,
    help="Give up this base, which cannot be read. May be given several times.",
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@format_options
def prune(url: str, keep: str, skipped: tuple[int, ...], yes: bool, as_json: bool) -> None:
    """Remove the bases that no rule keeps, the parts before the window, and their segments.

    The window begins at the oldest base that a rule of days or a count keeps; all moments in the
    window stay. Older bases, which rules of weeks and months keep, stay as single moments. The
    newest base always stays.
    """
    from topics_server.archive.continuous.prune import plan_prune, prune_archive
    from topics_server.archive.retention import parse_rules

    try:
        rules = parse_rules(keep)
    except ValueError as error:
        raise click.UsageError(f"--keep: {error}") from None
    store = opened(url)
    try:
        lock = store.lock_bases()
        try:
            plan = plan_prune(store, rules, skipped)
            if plan.gone or plan.gone_parts:
                confirm(
                    f"Remove {len(plan.gone)} of {len(plan.gone) + len(plan.bases)} bases and "
                    f"{plan.gone_parts} parts for good?",
                    yes=yes,
                )
            pruned = prune_archive(store, plan)
        finally:
            lock.release()
    except StorageError as error:
        raise Failure(str(error)) from None
    if as_json:
        write_line(msgspec.json.encode(pruned))
    else:
        note(f"bases kept: {', '.join(map(str, pruned.kept))}")
        note(f"bases removed: {', '.join(map(str, pruned.removed)) or 'none'}")
        note(f"{pruned.parts} parts; {pruned.segments} files of segments, {pruned.bytes} bytes")


@command.command("unlock")
@_URL
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def unlock(url: str, yes: bool) -> None:
    """Remove the lock that a killed prune left in a bucket.

    With the lock, the server makes no new base. First make sure that no prune runs: two prunes at
    once, or a prune during a new base, could remove files that the other needs. A folder needs no
    unlock.
    """
    try:
        store = opened(url)
        holder = store.lock_holder()
        if holder is None:
            note("the archive is not locked")
            return
        confirm(f"Remove the lock of {holder}?", yes=yes)
        store.break_lock()
    except StorageError as error:
        raise Failure(str(error)) from None
    note("the archive is not locked any more")


def _rows(
    numbers: list[int],
    bases: list[ArchiveBase],
    history: ArchiveHistory,
    problems: list[str],
) -> list[dict[str, int | str]]:
    """A row for each base. `until` is the last moment that the parts behind the base reach."""
    from topics_server.archive.continuous.moments import shown

    ends: dict[int, tuple[int, int]] = {}
    for index, number in enumerate(numbers):
        # The last part of each stretch: the parts before a gap, and the newest part.
        is_last = index + 1 == len(numbers)
        try:
            facts = history.facts(number if is_last else numbers[index + 1])
        except StorageError as error:
            problems.append(str(error))
            continue
        if is_last:
            ends[facts.stretch] = facts.ts_ms, facts.last_lsn
        elif facts.begins_stretch:
            before = history.facts(number)
            ends[before.stretch] = before.ts_ms, before.last_lsn
    rows: list[dict[str, int | str]] = []
    for base in reversed(bases):
        backup = base.backup.facts
        has_parts = bool(numbers) and base.part >= numbers[0]
        end_ts, end_lsn = ends.get(base.stretch, (0, 0)) if has_parts else (0, 0)
        values = (
            base.part,
            shown(base.ts_ms),
            base.last_lsn,
            backup.topics,
            backup.segments,
            backup.segment_bytes,
            shown(max(end_ts, base.ts_ms)),
            max(end_lsn, base.last_lsn),
        )
        rows.append(dict(zip(_COLUMNS, values, strict=True)))
    return rows
