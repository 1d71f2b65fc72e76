"""The values that the view service takes and returns. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from topics_server.values.model import OnDelete, ViewDefinition

ViewStatus = Literal["ready", "building", "failed", "waiting"]


class ViewFailure(msgspec.Struct, frozen=True):
    """Why a view stopped: the record, the statement and the database's message.

    `seq` is 0 if no record is at fault (for example, the disk is full); the view then tries again.
    """

    seq: int
    statement: str
    message: str


class ViewState(msgspec.Struct, frozen=True):
    """A view as `GET` shows it. `processed_seq`: records up to this seq are applied.

    `known_from_seq`: records below it were evicted before the view could apply them.
    `building_seq`: how far the next build is; None if there is none. `bytes`: the size of the
    view's files.
    """

    topic: str
    name: str
    definition: ViewDefinition
    status: ViewStatus
    processed_seq: int
    head_seq: int
    known_from_seq: int = 1
    building_seq: int | None = None
    failure: ViewFailure | None = None
    bytes: int = 0
    applied_total: int = 0
    rebuilds_total: int = 0

    @property
    def lag(self) -> int:
        """The number of records between `processed_seq` and the head."""
        return max(0, self.head_seq - self.processed_seq)


class ViewOutcome(msgspec.Struct, frozen=True):
    """The outcome of a `PUT`: whether the view is new, and whether its definition changed."""

    created: bool
    changed: bool
    definition: ViewDefinition


class ViewRows(msgspec.Struct, frozen=True):
    """The rows of one query. `rows`: a JSON array of arrays, as bytes.

    `processed_seq` belongs to these rows: both were read in one transaction. `is_cut`: whether
    there were more rows than an answer may have.
    """

    columns: list[str]
    rows: bytes
    row_count: int
    processed_seq: int
    is_cut: bool = False


__all__ = [
    "OnDelete",
    "ViewRows",
    "ViewDefinition",
    "ViewFailure",
    "ViewOutcome",
    "ViewState",
    "ViewStatus",
]
