"""`topics repair DIR`: shows what damage costs and mends the journal.

With --begin-anew or --adopt-cold: put right a data directory and a cold folder that do not fit.
Offline: it takes the locks of a server. Exit code 0: nothing is damaged, or it was mended. 1: it is
damaged and nothing was changed, or it cannot be mended.
"""

from __future__ import annotations

import click
import msgspec

from topics_server.cli.connection import Failure
from topics_server.cli.output import format_options, note, show_table, write_line
from topics_server.values.errors import StorageError


@click.command("repair")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--accept-loss", is_flag=True, help="Give up the damaged part; its bytes are kept.")
@click.option(
    "--cold-dir",
    type=click.Path(file_okay=False),
    help="The cold folder, which holds older segments.",
)
@click.option(
    "--begin-anew",
    metavar="STORE_ID",
    help="Move this store's remaining files aside; delete nothing.",
)
@click.option(
    "--adopt-cold", is_flag=True, help="Write the store's id into a cold folder without STORE."
)
@format_options
@click.pass_context
def command(
    ctx: click.Context,
    directory: str,
    accept_loss: bool,
    cold_dir: str | None,
    begin_anew: str | None,
    adopt_cold: bool,
    as_json: bool,
) -> None:
    """Show what is damaged in the journal of DIR, and what giving it up would cost.

    Changes nothing without --accept-loss. With it, the damaged bytes are kept in DIR/set-aside/,
    readers are told that their seqs are damaged, and none of these is ever given out again.

    A start refuses a data directory and a cold folder that are not one store. --begin-anew moves
    what is left of STORE_ID into set-aside/ of each folder, and the next start makes a new store.
    --adopt-cold says that a cold folder without STORE is this store's.
    """
    from topics_server.runtime.clock import random_u64
    from topics_server.wal.directory import Directory, read_format
    from topics_server.wal.fs import OsFs
    from topics_server.wal.snapshots.store import PublishedSnapshots
    from topics_server.wal.tools import repair

    if sum((accept_loss, begin_anew is not None, adopt_cold)) > 1:
        raise click.UsageError("--accept-loss, --begin-anew and --adopt-cold exclude each other")
    if begin_anew is not None:
        _begin_anew(directory, cold_dir, begin_anew, as_json=as_json)
        return
    if adopt_cold:
        if cold_dir is None:
            raise click.UsageError("--adopt-cold needs --cold-dir")
        _adopt_cold(directory, cold_dir, as_json=as_json)
        return
    fs = OsFs()
    try:
        mark = read_format(fs, directory)
        if mark is None:
            raise Failure(f"{directory}: not a data directory of this server (no FORMAT)")
        locked = Directory.open(fs, directory, boot_id="")
    except StorageError as error:
        raise Failure(str(error)) from None
    kept = ""
    try:
        image = PublishedSnapshots(fs, directory).newest()
        found = repair.survey(fs, directory, mark, image)
        if found.is_damaged and accept_loss:
            kept = repair.mend(fs, directory, mark, found, random_u64)
            if repair.survey(fs, directory, mark, image).is_damaged:
                raise Failure("the journal is still damaged; the report is in " + kept)
    except StorageError as error:
        raise Failure(str(error)) from None
    finally:
        locked.close()
    _show(found, kept, as_json=as_json)
    ctx.exit(1 if found.is_damaged and not accept_loss else 0)


def _begin_anew(directory: str, cold_dir: str | None, store_id: str, *, as_json: bool) -> None:
    from topics_server.wal.fs import OsFs
    from topics_server.wal.tools.begin_anew import begin_anew

    try:
        folders = begin_anew(OsFs(), directory, cold_dir, store_id)
    except StorageError as error:
        raise Failure(str(error)) from None
    if as_json:
        write_line(msgspec.json.encode({"store_id": store_id, "set_aside": folders}))
        return
    for folder in folders:
        note(f"store {store_id} is in {folder} now")
    note("the next start makes a new store; to undo this, move the files back")


def _adopt_cold(directory: str, cold_dir: str, *, as_json: bool) -> None:
    from topics_server.wal.directory import Directory, read_format
    from topics_server.wal.fs import OsFs
    from topics_server.wal.tools.begin_anew import adopt_cold

    fs = OsFs()
    try:
        if read_format(fs, directory) is None:
            raise Failure(f"{directory}: not a data directory of this server (no FORMAT)")
        locked = Directory.open(fs, directory, boot_id="")
        try:
            adopt_cold(fs, locked, cold_dir)
        finally:
            locked.close()
    except StorageError as error:
        raise Failure(str(error)) from None
    if as_json:
        write_line(msgspec.json.encode({"store_id": locked.store_id, "cold_dir": cold_dir}))
    else:
        note(f"{cold_dir} is the cold folder of store {locked.store_id}")


def _show(found: object, kept: str, *, as_json: bool) -> None:
    from topics_server.wal.tools.repair import Survey, facts_of

    assert isinstance(found, Survey)
    if as_json:
        write_line(msgspec.json.encode({**facts_of(found), "set_aside": kept or None}))
        return
    if not found.is_damaged:
        note("the journal is whole")
        return
    for path in found.end_marks:
        note(f"{path}: missing, or it does not match its files; the last writes cannot be proven")
    rows = [(region.path, str(region.start), str(region.length)) for region in found.regions]
    if rows:
        show_table(("damaged", "at", "bytes"), rows)
    for lost in found.lost:
        most = "at most " if lost.is_bound else ""
        note(f"{lost.topic}: seqs {lost.first_seq} to {most}{lost.last_seq}")
    for topic_id, count in found.nameless.items():
        note(f"{count} records of a topic whose creation is lost (id {topic_id})")
    if rows:
        note("deletes, acks and settings of topics in the damaged part are undone")
    note(f"kept in {kept}" if kept else "nothing was changed; --accept-loss gives up this part")
