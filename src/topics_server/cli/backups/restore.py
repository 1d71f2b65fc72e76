"""`topics restore FOLDER DIR`: makes a data directory from a backup.

Exit code 0: DIR is ready for `topics serve`. 1: refused or damaged; what is in DIR is no store.
"""

from __future__ import annotations

import click
import msgspec

from topics_server.cli.connection import Failure
from topics_server.cli.output import format_options, note, show_object
from topics_server.values.errors import StorageError


@click.command("restore")
@click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False))
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option(
    "--backup", "number", type=click.IntRange(1), metavar="NUMBER", help="Default: the newest one."
)
@click.option(
    "--skip",
    "skipped",
    type=click.IntRange(1),
    metavar="NUMBER",
    multiple=True,
    help="Do not ask this backup, which cannot be read. May be given several times.",
)
@format_options
def command(
    folder: str, directory: str, number: int | None, skipped: tuple[int, ...], as_json: bool
) -> None:
    """Make the data directory DIR, a new or empty folder, from a backup in FOLDER.

    DIR is a store of its own, with a new id: topics, records, deletes, queues, routers, producers
    and sessions as they were. New records get seqs behind all that any backup in FOLDER knows;
    readers are told of the seqs between as damaged. Views are built anew. A backup that cannot be
    read stops the restore, also if another one is restored: it may know seqs that the others do
    not. With --skip these may be assigned again.
    """
    from topics_server.archive.object_store import FolderStore
    from topics_server.archive.restore import restore
    from topics_server.wal.fs import OsFs

    fs = OsFs()
    try:
        store = FolderStore.open(fs, folder, write=False)
        made = restore(fs, store, directory, number, skipped=skipped)
    except StorageError as error:
        raise Failure(str(error)) from None
    show_object(msgspec.json.encode(made), as_json=as_json)
    note(f"start it with: topics serve --data-dir {directory}")
