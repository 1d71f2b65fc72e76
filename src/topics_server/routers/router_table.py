"""All routers: a projection of the journal with the graph's rules (§6). Pure.

Holds definitions only; cursors are in the destinations. Dropping the source or the destination
deletes a router, live and in replay, without an entry of its own. The edges of the graph are names,
so a definition can be checked before its topics exist. A leaf of the service: pure, on the loop's
thread. Satisfies `projections.Projection`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator
from typing import Final

import msgspec

from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.registry import Registry
from topics_server.values.entries import Entry, RouterDeleted, RouterPut, TopicDropped
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import RouterDefinition
from topics_server.values.storage_types import ROUTERS_PARTS, RouterImage, RoutersPart

_PIECE_ROUTERS: Final = 256
_NOTHING: Final = Applied()


class Router(msgspec.Struct):
    """One router. `start_seq`, `known_seq`: see `entries.RouterPut`."""

    router_id: int
    name: str
    created_ts: int
    definition: RouterDefinition
    source_id: int
    dest_id: int
    start_seq: int
    known_seq: int


class RouterTable:
    """All routers by name and id. `next_router_id`: ids below it may have been used.

    `sources`: topics whose records pages without payloads may refer to since the start of the
    newest snapshot; shared with `engine/commit/router_pages` and recovery.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Router] = {}
        self._by_id: dict[int, Router] = {}
        self._of_source: dict[int, dict[int, Router]] = {}
        self._of_dest: dict[int, dict[int, Router]] = {}
        self._names: list[str] = []
        self._applied_lsn = 0
        self.next_router_id = 1
        self.sources: set[int] = set()
        # Called with every router that is created, changed or deleted; set once the pump runs.
        self.on_put: Callable[[Router], None] | None = None
        self.on_gone: Callable[[Router], None] | None = None
        # Whether a topic still exists: a drop may overtake a router's entry on its shard.
        self.exists: Callable[[int], bool] | None = None

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Router]:
        return iter(list(self._by_id.values()))

    def find(self, name: str) -> Router | None:
        """The router of a name."""
        return self._by_name.get(name)

    def get(self, router_id: int) -> Router | None:
        """The router of an id."""
        return self._by_id.get(router_id)

    def from_source(self, topic_id: int) -> Collection[Router]:
        """The routers that copy from a topic."""
        return self._of_source.get(topic_id, {}).values()

    def of_topic(self, topic_id: int) -> list[str]:
        """Names of the routers whose source or destination is this topic, in order."""
        found = [*self.from_source(topic_id), *self._of_dest.get(topic_id, {}).values()]
        return sorted({router.name for router in found})

    def page(
        self,
        *,
        prefix: str,
        source: str | None,
        dest: str | None,
        after: str | None,
        size: int,
        may_name: Callable[[str], bool] | None = None,
    ) -> tuple[list[Router], str | None]:
        """Up to `size` routers in name order, and the name to continue after if more follow.

        `may_name`: return only routers whose own name, source and destination it accepts.
        """
        assert size > 0
        names = self._names
        start = bisect_left(names, prefix)
        if after is not None:
            start = max(start, bisect_right(names, after))
        found: list[Router] = []
        for index in range(start, len(names)):
            name = names[index]
            if not name.startswith(prefix):
                break
            router = self._by_name[name]
            definition = router.definition
            if source is not None and definition.source != source:
                continue
            if dest is not None and definition.dest != dest:
                continue
            if may_name is not None and not all(
                map(may_name, (name, definition.source, definition.dest))
            ):
                continue
            if len(found) == size:
                return found, found[-1].name
            found.append(router)
        return found, None

    # -- the graph -------------------------------------------------------------------------

    def check(self, name: str, definition: RouterDefinition) -> None:
        """Check whether a router of this name may have this definition.

        Raises `topic_exists_incompatible` if its destination would have two sources, and
        `router_cycle` with the path.
        """
        for other in self._by_id.values():
            known = other.definition
            if other.name != name and known.dest == definition.dest:
                if known.source == definition.source:
                    break
                raise TopicsError(
                    Code.TOPIC_EXISTS_INCOMPATIBLE,
                    f'"{definition.dest}" already receives the records of "{known.source}"; '
                    "a destination can have only one source",
                    {
                        "reason": "router_dest_fan_in",
                        "dest": definition.dest,
                        "source": known.source,
                        "router": other.name,
                    },
                )
        if not definition.allow_cycle and not self._is_edge(name, definition):
            path = self._path(definition.dest, definition.source, without=name)
            if path is not None:
                raise TopicsError(
                    Code.ROUTER_CYCLE,
                    "the router would create a cycle; allow_cycle: true permits it",
                    {"cycle": [definition.source, *path]},
                )

    def _is_edge(self, name: str, definition: RouterDefinition) -> bool:
        """Whether the router of this name has these two topics already and may close no cycle.

        Such a definition adds no edge to the graph, so it cannot close a new cycle.
        """
        router = self._by_name.get(name)
        if router is None or router.definition.allow_cycle:
            return False
        now = router.definition
        return (now.source, now.dest) == (definition.source, definition.dest)

    def _path(self, start: str, goal: str, *, without: str) -> list[str] | None:
        """The topics from `start` to `goal` along the routers, both included."""
        edges: dict[str, list[str]] = {}
        for router in self._by_id.values():
            if router.name != without:
                edges.setdefault(router.definition.source, []).append(router.definition.dest)
        came_from: dict[str, str] = {start: start}
        reached = [start]
        for topic in reached:
            if topic == goal:
                path = [goal]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            for following in edges.get(topic, ()):
                if following not in came_from:
                    came_from[following] = topic
                    reached.append(following)
        return None

    # -- journal ---------------------------------------------------------------------------

    def stage(self, lsn: int, entry: Entry) -> None:
        """See `projections.Owner`. One entry at a time: the service waits for each."""

    def commit_staged(self, lsn: int) -> None:
        """See `projections.Owner`."""

    def undo_from(self, lsn: int) -> None:
        """See `projections.Owner`."""

    def apply(self, lsn: int, entry: Entry) -> Applied:
        """See `projections.Projection`."""
        assert isinstance(entry, RouterPut | RouterDeleted), "not an entry of the routers"
        if isinstance(entry, RouterPut):
            self.sources.add(entry.source_id)
            self.next_router_id = max(self.next_router_id, entry.router_id + 1)
        if lsn <= self._applied_lsn:
            return _NOTHING
        self._applied_lsn = lsn
        if isinstance(entry, RouterDeleted):
            router = self._by_id.get(entry.router_id)
            if router is not None:
                self._remove(router)
            return _NOTHING
        router = self._by_id.get(entry.router_id)
        if self.exists and not (self.exists(entry.source_id) and self.exists(entry.dest_id)):
            return _NOTHING
        if router is None:
            older = self._by_name.get(entry.name)
            if older is not None:
                # A router with another source or another destination counts as a new one.
                self._remove(older)
            router = Router(
                router_id=entry.router_id,
                name=entry.name,
                created_ts=entry.ts,
                definition=entry.definition,
                source_id=entry.source_id,
                dest_id=entry.dest_id,
                start_seq=entry.start_seq,
                known_seq=entry.known_seq,
            )
            self._add(router)
        else:
            router.definition = entry.definition
            router.start_seq = entry.start_seq
            router.known_seq = entry.known_seq
        if self.on_put is not None:
            self.on_put(router)
        return _NOTHING

    def observe(self, lsn: int, entry: Entry, applied: Applied) -> None:
        """Observe an applied entry: dropping a topic deletes its routers (§1.4)."""
        if isinstance(entry, TopicDropped):
            for found in (self._of_source, self._of_dest):
                for router in list(found.get(entry.topic_id, {}).values()):
                    self._remove(router)

    def _add(self, router: Router) -> None:
        assert router.name not in self._by_name
        self._by_name[router.name] = self._by_id[router.router_id] = router
        self._of_source.setdefault(router.source_id, {})[router.router_id] = router
        self._of_dest.setdefault(router.dest_id, {})[router.router_id] = router
        insort(self._names, router.name)

    def _remove(self, router: Router) -> None:
        del self._by_name[router.name], self._by_id[router.router_id]
        for found, topic_id in (
            (self._of_source, router.source_id),
            (self._of_dest, router.dest_id),
        ):
            del found[topic_id][router.router_id]
            if not found[topic_id]:
                del found[topic_id]
        del self._names[bisect_left(self._names, router.name)]
        if self.on_gone is not None:
            self.on_gone(router)

    # -- snapshots and restarts ------------------------------------------------------------

    def capture(self) -> Iterator[bytes]:
        """See `projections.Projection`. Yields nothing if there never was a router."""
        if self.next_router_id == 1:
            return
        applied_lsn, next_id, sources = self._applied_lsn, self.next_router_id, list(self.sources)
        routers = list(self._by_id.values())
        for start in range(0, max(1, len(routers)), _PIECE_ROUTERS):
            images = [_image_of(router) for router in routers[start : start + _PIECE_ROUTERS]]
            part = RoutersPart(ROUTERS_PARTS.version, applied_lsn, next_id, sources, images)
            yield msgspec.msgpack.encode(part)
            sources = []

    def restore(self, part: bytes) -> None:
        """See `projections.Projection`."""
        captured = ROUTERS_PARTS.decode(part)
        self._applied_lsn = captured.applied_lsn
        self.next_router_id = max(self.next_router_id, captured.next_router_id)
        self.sources.update(captured.sources)
        for image in captured.routers:
            self._add(Router(**{name: getattr(image, name) for name in image.__struct_fields__}))

    def finish_recovery(self, topics: Registry) -> None:
        """Delete routers whose topic does not exist, and cursors of deleted routers."""
        for router in list(self._by_id.values()):
            if topics.get(router.source_id) is None or topics.get(router.dest_id) is None:
                self._remove(router)
        for topic in topics:
            if topic.cursors:
                for router_id in [known for known in topic.cursors if known not in self._by_id]:
                    del topic.cursors[router_id]


def _image_of(router: Router) -> RouterImage:
    return RouterImage(*[getattr(router, name) for name in RouterImage.__struct_fields__])
