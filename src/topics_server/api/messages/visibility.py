"""Hides topics and routers that a key's prefixes do not cover. Pure.

Neither content nor counts reveal a name outside the prefixes: lists skip such a name, their cursors
are names that were listed, and answers and errors leave it out. A router belongs to a key if its
own name, its source and its destination all do. Called by the handlers of topics, records, routers
and WebSockets, and by `metrics_snapshot`; a caller without prefixes sees everything, and its
requests cost nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from topics_server.auth.api_keys import Caller
from topics_server.auth.authorize import check_name
from topics_server.engine.answers import TopicPage, TopicState
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import RouterDefinition, TopicConfig

_CONFIG_TOPICS = ("dead_letter", "lease_log")


class Lists(Protocol):
    """The store's method that lists topics by prefix; see `context.StorePort`."""

    def list_topics(
        self,
        *,
        prefix: str,
        after: str | None,
        page_size: int,
        touch: bool,
        keep: Callable[[str], bool] | None = None,
    ) -> TopicPage:
        """Topics in name order after `after`; with `keep` only names that it accepts."""
        ...


def list_topics(
    store: Lists, caller: Caller, *, prefix: str, after: str | None, page_size: int, touch: bool
) -> TopicPage:
    """A page of the topics that the caller may name, in name order."""
    if not caller.prefixes:
        return store.list_topics(prefix=prefix, after=after, page_size=page_size, touch=touch)
    found: list[TopicState] = []
    for start in _ranges(caller.prefixes, prefix):
        room = page_size - len(found)
        page = store.list_topics(
            prefix=start,
            after=after,
            page_size=max(1, room),
            touch=touch and room > 0,
            # A name that is a hash may belong to another key, even if it has this prefix.
            keep=caller.may_name,
        )
        if not room:
            if page.topics:
                return TopicPage(found, found[-1].name)
            continue
        found += page.topics
        if page.next_after is not None:
            return TopicPage(found, page.next_after)
    return TopicPage(found, None)


def _ranges(prefixes: Sequence[str], prefix: str) -> list[str]:
    """Prefixes of all names that start with `prefix` and one of `prefixes`: sorted, disjoint."""
    both = [
        max(own, prefix, key=len)
        for own in prefixes
        if own.startswith(prefix) or prefix.startswith(own)
    ]
    disjoint: list[str] = []
    for start in sorted(both):
        if not disjoint or not start.startswith(disjoint[-1]):
            disjoint.append(start)
    return disjoint


def shown_state(caller: Caller, state: TopicState) -> TopicState:
    """A topic's state, without the names outside the prefixes that its configuration has."""
    if not caller.prefixes:
        return state
    config = state.config
    if config.dead_letter is not None and not caller.may_name(config.dead_letter):
        config = replace(config, dead_letter=None)
    if isinstance(config.lease_log, str) and not caller.may_name(config.lease_log):
        config = replace(config, lease_log=UNSET)
    return state if config is state.config else replace(state, config=config)


def check_config(caller: Caller, config: TopicConfig, within: str = "") -> None:
    """Raise `forbidden` if a configuration names a topic outside the prefixes.

    `within` is the path of the configuration in the body.
    """
    if caller.prefixes:
        for field in _CONFIG_TOPICS:
            name = getattr(config, field)
            if isinstance(name, str):
                check_name(caller, name, within + field)


# --- routers ----------------------------------------------------------------------------------


def sees_router(caller: Caller, name: str, definition: RouterDefinition) -> bool:
    """Whether a router belongs to the caller: its name, its source and its destination."""
    return (
        caller.may_name(name)
        and caller.may_name(definition.source)
        and caller.may_name(definition.dest)
    )


def check_router(caller: Caller, name: str, definition: RouterDefinition) -> None:
    """Raise `forbidden` for an existing router that uses a name outside the prefixes.

    The error does not show that name.
    """
    if not sees_router(caller, name, definition):
        raise TopicsError(
            Code.FORBIDDEN,
            f'"{name}" uses names to which the key gives no access',
            {"field": "router", "name": name},
        )


def shown_conflict(caller: Caller, error: TopicsError) -> TopicsError:
    """The error for a refused router, without the conflicting names outside the prefixes."""
    if not caller.prefixes:
        return error
    cycle = error.detail.get("cycle")
    if cycle is not None:
        inside = [name for name in cycle if caller.may_name(name)]
        return TopicsError(error.code, error.message, {**error.detail, "cycle": inside})
    if error.detail.get("reason") == "router_dest_fan_in":
        others = {field: error.detail[field] for field in ("source", "router")}
        if not all(map(caller.may_name, others.values())):
            dest = error.detail["dest"]
            return TopicsError(
                error.code,
                f'"{dest}" already receives the records of another topic; '
                "a destination can have only one source",
                {name: value for name, value in error.detail.items() if name not in others},
            )
    return error
