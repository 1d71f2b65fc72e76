"""The routes `POST /v0/admin/backup` and `GET /v0/admin/backup`.

A backup is written to the folder in the settings; a request cannot name a path. Plain functions of
the server's state and one request; the body is not read. Called through the route table.
"""

from __future__ import annotations

import msgspec

from topics_server.api.context import BackupsPort, ServerState
from topics_server.api.messages.responses import render_json
from topics_server.api.readiness import admit
from topics_server.api.request import Request, Response
from topics_server.values.errors import Code, TopicsError
from topics_server.values.storage_types import BackupState


def start_backup(state: ServerState, request: Request) -> Response:
    """`POST /v0/admin/backup`: begin a backup, or show the running one."""
    return _shown(200, _backups_for(state, request).begin(), request)


def show_backup(state: ServerState, request: Request) -> Response:
    """`GET /v0/admin/backup`: the newest backup that this server began."""
    return _shown(200, _backups_for(state, request).state, request)


def _backups_for(state: ServerState, request: Request) -> BackupsPort:
    """The service that makes backups.

    Raises `forbidden` for a key with prefixes, and `not_found` if the settings have no backup
    folder.
    """
    admit(state)
    if state.backups is None:
        raise TopicsError(Code.NOT_FOUND, "there is no folder for backups: set TOPICS_BACKUP_DIR")
    if request.caller.prefixes:
        raise TopicsError(
            Code.FORBIDDEN, "a backup holds every topic, and the key gives access to some only"
        )
    return state.backups


def _shown(status: int, shown: BackupState, request: Request) -> Response:
    fields = msgspec.structs.asdict(shown)
    present = {name: value for name, value in fields.items() if value is not None}
    return Response(status, render_json(present, request.elapsed_ms()))
