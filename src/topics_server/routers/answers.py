"""The values that the router service takes and returns. Pure."""

from __future__ import annotations

import msgspec

from topics_server.values.model import RouterDefinition


class RouterSpec(msgspec.Struct, frozen=True):
    """A `PUT` as it was asked for, with defaults filled in (§6).

    `from_earliest`: a router that is new starts at the beginning of its source, not at its head.
    """

    definition: RouterDefinition
    create_dest: bool = True
    from_earliest: bool = False


class RouterOutcome(msgspec.Struct, frozen=True):
    """Outcome of a `PUT`."""

    created: bool
    definition: RouterDefinition
    write_ms: float = 0.0
    sync_ms: float = 0.0


class RouterState(msgspec.Struct, frozen=True):
    """A router as `GET` shows it.

    `forwarded_total`: copies made since it was created. `cursor_seq`: up to here its source was
    examined. `lag`: seqs of the source behind that. `stalled`: why it does not go on, the code and
    message of what its destination or the server refused; None while it runs.
    """

    name: str
    definition: RouterDefinition
    forwarded_total: int
    cursor_seq: int
    lag: int
    stalled: tuple[str, str] | None = None


class RouterListPage(msgspec.Struct, frozen=True):
    """One page of the list, in name order; `next_after` when more follow."""

    routers: list[RouterState]
    next_after: str | None = None
