"""The values that the view service takes and returns. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from topics_server.values.model import OnDelete, ViewDefinition

ViewStatus = Literal["ready", "building", "failed", "waiting"]


class ViewFailure(msgspec.Struct, frozen=True):
    """Why a view stopped: the record, the statement and the words of the database.

    `seq` is 0 when no record is at fault (the disk is full, say); the view then tries again.
    """

    seq: int
    statement: str
    message: str


class ViewState(msgspec.Struct, frozen=True):
    """A view as `GET` shows it. `processed_seq`: every record up to it, it included, is applied.

    `known_from_seq`: records below it were evicted before the view could apply them.
    `building_seq`: how far the next build is, None if there is none. `bytes`: of its files.
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
        """Records between the head and what is applied."""
        return max(0, self.head_seq - self.processed_seq)


class ViewOutcome(msgspec.Struct, frozen=True):
    """Outcome of a `PUT`: whether the view is new, and whether its definition changed."""

    created: bool
    changed: bool
    definition: ViewDefinition


class ViewRows(msgspec.Struct, frozen=True):
    """Rows of one query. `rows`: a JSON array of arrays, as bytes.

    `processed_seq` belongs to these rows: both were read in one transaction. `is_cut`: there were
    more rows than an answer may have.
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
