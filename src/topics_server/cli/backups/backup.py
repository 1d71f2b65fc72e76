"""`topics backup`: makes a running server write a backup, or copies a stopped server's directory.

Exit code 0: the backup is made. 1: it failed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
import msgspec

from topics_server.cli.connection import Failure, ServerConnection, server_options
from topics_server.cli.output import format_options, note, show_object
from topics_server.runtime.clock import pause
from topics_server.values.errors import StorageError

PATH = "/v0/admin/backup"
_POLL_S = 0.2


class _State(msgspec.Struct):
    status: str
    number: int | None = None
    reason: str = ""


_STATE: Final = msgspec.json.Decoder(_State)


@click.command("backup")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(file_okay=False))
@click.option(
    "--into", metavar="FOLDER", type=click.Path(file_okay=False), help="With DIR: where to."
)
@click.option(
    "--cold-dir",
    type=click.Path(file_okay=False),
    help="With DIR: the cold folder, which holds older segments.",
)
@click.option("--no-wait", is_flag=True, help="Begin it, and do not wait for its end.")
@format_options
@server_options
def command(
    directory: str | None,
    into: str | None,
    cold_dir: str | None,
    no_wait: bool,
    client: ServerConnection,
    as_json: bool,
) -> None:
    """Make a backup of a running server into its TOPICS_BACKUP_DIR. The server continues to serve.

    With DIR: make a backup of this data directory, whose server is stopped, into --into. Segments
    that an earlier backup in the folder has are not copied again. 'topics restore' restores a
    backup.
    """
    if directory is None:
        if into is not None or cold_dir is not None:
            raise click.UsageError("--into and --cold-dir are for a DIR; a server has its own")
        show_object(_of_server(client, no_wait=no_wait), as_json=as_json)
        return
    if into is None:
        raise click.UsageError("say with --into FOLDER where the backup of DIR goes")
    from topics_server.archive.offline import back_up
    from topics_server.wal.fs import OsFs

    # Make the path absolute: the data directory stores it for runs in other working directories.
    folder = str(Path(into).absolute())
    try:
        facts = back_up(OsFs(), directory, cold_dir, folder)
    except StorageError as error:
        raise Failure(str(error)) from None
    for path in facts.damaged_segments:
        note(f"damaged, copied as it is: {path}")
    shown = {
        "number": facts.number,
        "topics": facts.topics,
        "segments": facts.segments,
        "segment_bytes": facts.segment_bytes,
        "copied_bytes": facts.copied_bytes,
        "damaged_segments": len(facts.damaged_segments),
    }
    show_object(msgspec.json.encode(shown), as_json=as_json)


def _of_server(client: ServerConnection, *, no_wait: bool) -> bytes:
    answer = client.call("POST", PATH)
    started = _STATE.decode(answer)
    state = started
    while state.status == "running" and not no_wait:
        pause(_POLL_S)
        answer = client.call("GET", PATH, repeatable=True)
        state = _STATE.decode(answer)
    if state.status in ("none", "failed"):
        raise Failure(f"the backup failed: {state.reason or 'the server was restarted meanwhile'}")
    return answer
