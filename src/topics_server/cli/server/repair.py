"""`topics repair DIR`: shows what would be lost, repairs journal and sealed indexes.

With --begin-anew or --adopt-cold it resolves a mismatch between a data directory and a cold folder.
It works offline and takes the locks of a server. Exit code 0: nothing is damaged, or the damage is
repaired. 1: something is damaged and nothing was changed, or it cannot be repaired.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from topics_server.cli.connection import Failure
from topics_server.cli.output import format_options, note, show_table, write_line
from topics_server.values.errors import StorageError

if TYPE_CHECKING:
    from topics_server.wal.tools.repair import Survey
    from topics_server.wal.tools.sealed_repair import SealedSeqs, SealedSurvey


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
    """Show the damage in journal and segments of DIR, and the records that a repair would lose.

    The command changes nothing without --accept-loss. With it, the command keeps the damaged bytes
    of the journal in DIR/set-aside/; readers then get their seqs as damaged, and no seq is assigned
    again. It rebuilds a damaged index of a segment from its records and keeps the damaged one in
    DIR/quarantine/. Damaged records of a segment stay where they are: restore their file.

    The server refuses to start if data directory and cold folder do not belong to one store.
    --begin-anew moves the files of STORE_ID into set-aside/ of each folder, and the next start
    makes a new store. --adopt-cold declares that a cold folder without STORE belongs to this store.
    """
    from topics_server.runtime.clock import random_u64
    from topics_server.wal.directory import Directory, read_format
    from topics_server.wal.fs import OsFs
    from topics_server.wal.snapshots.store import PublishedSnapshots
    from topics_server.wal.tools import repair
    from topics_server.wal.tools.sealed_repair import survey_segments

    if sum((accept_loss, begin_anew is not None, adopt_cold)) > 1:
        raise click.UsageError("give only one of --accept-loss, --begin-anew and --adopt-cold")
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
        sealed = survey_segments(fs, directory, cold_dir, mark, image, remake=accept_loss)
    except StorageError as error:
        raise Failure(str(error)) from None
    finally:
        locked.close()
    _show(found, sealed, kept, is_mended=accept_loss, as_json=as_json)
    ctx.exit(1 if (found.is_damaged or sealed.is_damaged) and not accept_loss else 0)


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


def _show(
    found: Survey, sealed: SealedSurvey, kept: str, *, is_mended: bool, as_json: bool
) -> None:
    from topics_server.wal.tools.repair import facts_of

    if as_json:
        facts = {**facts_of(found), "set_aside": kept or None, "segments": sealed}
        write_line(msgspec.json.encode(facts))
        return
    if not found.is_damaged:
        note("the journal is whole")
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
    _show_segments(sealed, is_mended=is_mended)
    if kept:
        note(f"kept in {kept}")
    elif (found.is_damaged or sealed.indexes) and not is_mended:
        note("nothing was changed; --accept-loss gives up this part")


def _show_segments(sealed: SealedSurvey, *, is_mended: bool) -> None:
    if not (sealed.is_damaged or sealed.not_looked_at):
        note("the segments are whole")
    for path in sealed.indexes:
        what = "was made again" if is_mended else "is damaged; it can be made again"
        note(f"{path} {what} from the segment's records")
    for each in sealed.lost:
        note(f"{each.topic}: {_seqs_of(each)} of segment {each.segment_id} cannot be read")
    for each in sealed.readable_again:
        note(f"{each.topic}: {_seqs_of(each)} can be read again; the next start serves them")
    for problem in sealed.not_looked_at:
        note(f"not looked at: {problem}")


def _seqs_of(each: SealedSeqs) -> str:
    ranges = (f"{first} to {last}" if first < last else f"{first}" for first, last in each.seqs)
    return "seqs " + ", ".join(ranges)
