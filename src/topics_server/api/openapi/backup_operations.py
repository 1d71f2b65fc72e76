"""The operations of backups. Pure.

Used by `api/openapi/document`.
"""

from __future__ import annotations

from typing import Final

from topics_server.api.openapi.operations import READS, WRITES, answer, operation
from topics_server.api.openapi.schemas import Schema, object_of, ref, text, u64
from topics_server.values.errors import Code

_NUMBERS: Final = "number started_ts finished_ts segments segment_bytes copied_bytes"


def backup_schemas() -> Schema:
    """The answer of both operations."""
    return {
        "BackupState": object_of(
            "status performance",
            status=text(
                "`none`: no backup since the server started.",
                enum=["none", "running", "done", "failed"],
            ),
            **{name: u64() for name in _NUMBERS.split()},
            topics=u64("Topics in the backup, with sealed segments and without."),
            damaged_segments=u64("Damaged files of segments, which the backup has as they are."),
            reason=text("Why it failed."),
            performance={"type": "object"},
        ),
    }


def backup_paths() -> Schema:
    """The operations by path."""
    start = operation(
        "startBackup",
        "Begin a backup into the server's folder for backups, unless one is under way.",
        {"200": answer("The backup that is under way.", ref("BackupState"))},
        tag="server",
        scopes=("admin",),
        codes=(*WRITES, Code.NOT_FOUND),
    )
    show = operation(
        "showBackup",
        "The newest backup that this server began.",
        {"200": answer("How far it is.", ref("BackupState"))},
        tag="server",
        scopes=("admin",),
        codes=(*READS, Code.NOT_FOUND),
    )
    return {"/v0/admin/backup": {"post": start, "get": show}}
