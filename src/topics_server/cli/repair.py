"""`topics repair DIR`: what a damaged journal holds and would cost; with --accept-loss, mend it.

Offline: it takes the directory's lock. Exit code 0: nothing is damaged, or it was mended. 1: it is
damaged and nothing was changed, or it cannot be mended.
"""

from __future__ import annotations

import click
import msgspec

from topics_server.cli.client import Failure
from topics_server.cli.output import format_options, note, show_table, write_line
from topics_server.errors import StorageError


@click.command("repair")
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option("--accept-loss", is_flag=True, help="Give up what is damaged; its bytes are kept.")
@format_options
@click.pass_context
def command(ctx: click.Context, directory: str, accept_loss: bool, as_json: bool) -> None:
    """Show what is damaged in the journal of DIR, and what giving it up would cost.

    Changes nothing without --accept-loss. With it, the damaged bytes are kept in DIR/set-aside/,
    readers are told that their seqs are damaged, and none of these is ever given out again.
    """
    from topics_server.clock import random_u64
    from topics_server.wal import mending
    from topics_server.wal.directory import Directory, read_format
    from topics_server.wal.fs import OsFs
    from topics_server.wal.snapshots import PublishedSnapshots

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
        found = mending.survey(fs, directory, mark, image)
        if found.regions and accept_loss:
            kept = mending.mend(fs, directory, mark, found, random_u64)
            if mending.survey(fs, directory, mark, image).regions:
                raise Failure("it is damaged still; what was done is in " + kept)
    except StorageError as error:
        raise Failure(str(error)) from None
    finally:
        locked.close()
    _show(found, kept, as_json=as_json)
    ctx.exit(1 if found.regions and not accept_loss else 0)


def _show(found: object, kept: str, *, as_json: bool) -> None:
    from topics_server.wal.mending import Survey, facts_of

    assert isinstance(found, Survey)
    if as_json:
        write_line(msgspec.json.encode({**facts_of(found), "set_aside": kept or None}))
        return
    if not found.regions:
        note("the journal is whole")
        return
    rows = [(region.path, str(region.start), str(region.length)) for region in found.regions]
    show_table(("damaged", "at", "bytes"), rows)
    for lost in found.lost:
        most = "at most " if lost.is_bound else ""
        note(f"{lost.topic}: seqs {lost.first_seq} to {most}{lost.last_seq}")
    for topic_id, count in found.nameless.items():
        note(f"{count} records of a topic whose creation is lost (id {topic_id})")
    note("deletes, acks and settings of topics in the damaged part are undone")
    note(f"kept in {kept}" if kept else "nothing was changed; --accept-loss gives this up")
