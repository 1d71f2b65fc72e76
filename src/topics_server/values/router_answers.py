"""The values that the router service takes and returns. Pure."""

from __future__ import annotations

import msgspec

from topics_server.values.model import RouterDefinition


class RouterSpec(msgspec.Struct, frozen=True):
    """A decoded `PUT` with defaults filled in (§6).

    `from_earliest`: a new router starts at the beginning of its source, not at its head.
    """

    definition: RouterDefinition
    create_dest: bool = True
    from_earliest: bool = False


class RouterOutcome(msgspec.Struct, frozen=True):
    """The outcome of a `PUT`."""

    created: bool
    definition: RouterDefinition
    write_ms: float = 0.0
    sync_ms: float = 0.0


class RouterState(msgspec.Struct, frozen=True):
    """A router as `GET` shows it.

    `forwarded_total`: copies made since it was created. `cursor_seq`: the last examined seq of its
    source. `lag`: seqs of the source after the cursor. `stalled`: the code and message of the error
    that stops the router; None while it runs.
    """

    name: str
    definition: RouterDefinition
    forwarded_total: int
    cursor_seq: int
    lag: int
    stalled: tuple[str, str] | None = None


class RouterListPage(msgspec.Struct, frozen=True):
    """One page of the list, in name order; `next_after` is set if more follow."""

    routers: list[RouterState]
    next_after: str | None = None
