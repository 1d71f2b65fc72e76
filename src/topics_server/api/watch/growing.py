"""The topics that match the prefixes of one stream: existing topics, and topics made later.

A later topic is announced by `topic-created` and read from its first record. Beyond the most topics
of a stream, an `error` frame names the topics that are left out; one of them is added when another
topic is deleted. Loop thread only. Used by `handlers`, by `api/live/stream` and by
`api/websocket/prefixes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from topics_server.api.watch.broadcast import BroadcastStream
from topics_server.api.watch.cursor_ids import IdOf, Positions
from topics_server.api.watch.sse import error_frame, topic_created
from topics_server.auth.api_keys import Caller
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.dispatcher import SubscriptionDispatcher
from topics_server.engine.subscribe.subscription import SubscriptionOptions

# Topics beyond the limit that an `error` frame names.
NAMED_MAX: Final = 16


def matching_names(
    dispatcher: SubscriptionDispatcher,
    caller: Caller,
    prefixes: Sequence[str],
    followed: Collection[str],
    count: int,
) -> list[str]:
    """At most `count` topics that match a prefix and are not in `followed`, in name order by
    prefix.
    """

    def is_new(name: str) -> bool:
        return name not in followed and name not in found and caller.may_name(name)

    found: dict[str, None] = {}
    for prefix in prefixes:
        if count > len(found):
            found |= dict.fromkeys(dispatcher.names(prefix, count - len(found), is_new))
    return list(found)


class GrowingTopics:
    """The cursors of one stream, in the order of its ids.

    `prefixes`: the caller may name all of them. `most`: how many topics the stream may follow.
    `left_out`: some of the matching topics beyond that number.
    """

    __slots__ = (
        "_caller",
        "_dispatcher",
        "_early",
        "_most",
        "_options",
        "_prefixes",
        "_stream",
        "cursors",
        "id_of",
        "left_out",
    )

    def __init__(
        self,
        dispatcher: SubscriptionDispatcher,
        caller: Caller,
        prefixes: Sequence[str],
        most: int,
        cursors: dict[str, Cursor],
    ) -> None:
        self.cursors = cursors
        self.left_out: list[str] = []
        self.id_of: Final = IdOf(cursors.values())
        self._dispatcher = dispatcher
        self._caller = caller
        self._prefixes = tuple(prefixes)
        self._most = most
        self._stream: BroadcastStream | None = None
        self._options: SubscriptionOptions | None = None
        # Topics that were created before the stream was open.
        self._early: list[str] = []

    def watch(self) -> None:
        """Follow the topics that are created from now on, until `stop`."""
        for prefix in self._prefixes:
            self._dispatcher.creations.watch(prefix, self.created)

    def stop(self) -> None:
        """Stop following new topics. Does nothing without an earlier `watch`."""
        for prefix in self._prefixes:
            self._dispatcher.creations.stop_watching(prefix, self.created)

    def has_prefix(self, name: str) -> bool:
        """Whether this name has one of the prefixes and the caller may use it."""
        return name.startswith(self._prefixes) and self._caller.may_name(name)

    def matching(self, followed: Collection[str], count: int) -> list[str]:
        """The next topics that match a prefix; see `matching_names`."""
        return matching_names(self._dispatcher, self._caller, self._prefixes, followed, count)

    def known(self, positions: Positions) -> Iterator[str]:
        """The topics in an id that exist and have one of the prefixes."""
        if isinstance(positions, dict):
            names: Iterable[str | None] = positions
        else:
            names = (self._dispatcher.name_of(each.topic_id) for each in positions)
        for name in names:
            is_meant = name is not None and self.has_prefix(name)
            if name is not None and is_meant and self._dispatcher.resolve(name) is not None:
                yield name

    def choose(self, named: Collection[str], known: Collection[str] = ()) -> list[str]:
        """The matching topics to follow besides the named ones; those in `known` come first.

        Fills `left_out`.
        """
        if not self._prefixes:
            return []
        others = [name for name in known if name not in named]
        room = max(0, self._most - len(named))
        others += self.matching({*named, *others}, max(0, room - len(others)) + NAMED_MAX)
        self.left_out = others[room:]
        return others[:room]

    def add_matching(self) -> list[str]:
        """Add the matching topics without a cursor; each is read from its beginning.

        Returns their names.
        """
        added: list[str] = []
        for name in self.choose(self.cursors):
            view = self._dispatcher.resolve(name)
            if view is not None:
                self.cursors[name] = Cursor(name, view.topic_id, view.epoch, 0)
                added.append(name)
        return added

    def is_at_beginning(self, name: str) -> bool:
        """Whether no record of the topic was read yet."""
        cursor = self.cursors[name]
        view = self._dispatcher.resolve(name)
        return view is not None and (cursor.topic_id, cursor.seq) == (view.topic_id, 0)

    def begin(
        self, stream: BroadcastStream, options: SubscriptionOptions, new: Collection[str]
    ) -> None:
        """Follow all topics; report those of `new` as created."""
        self._stream, self._options = stream, options
        cursors = list(self.cursors.values())
        if self.left_out:
            self._tell_left_out(self.left_out)
        for cursor in cursors:
            if cursor.name in new:
                self._tell_created(cursor)
            stream.follow(cursor, options)
        early, self._early = self._early, []
        for name in early:
            self.created(name)

    def created(self, name: str) -> None:
        """Called for a topic that was created, or found, with one of the prefixes."""
        stream, options = self._stream, self._options
        if stream is None or options is None:
            self._early.append(name)
            return
        if stream.is_over or name in self.cursors or name in self.left_out:
            return
        view = self._dispatcher.resolve(name)
        if view is None or not self._caller.may_name(name):
            return
        if len(self.cursors) >= self._most:
            # Limit the frames that are queued for a client that does not read.
            if len(self.left_out) < NAMED_MAX:
                self.left_out.append(name)
                self._tell_left_out([name])
            return
        cursor = self.cursors[name] = Cursor(name, view.topic_id, view.epoch, 0)
        self.renew_id()
        self._tell_created(cursor)
        stream.follow(cursor, options)

    def gone(self, name: str) -> None:
        """The stream has reported that a topic with a prefix was deleted."""
        assert self._stream is not None
        del self.cursors[name]
        self.renew_id()
        self._stream.push(self.id_line())
        self.left_out.clear()
        for other in self.matching(self.cursors, 1):
            self.created(other)
        # The topic may have been created again before its deletion was reported.
        self.created(name)

    def renew_id(self) -> None:
        """The cursors have changed: put the new set into all later ids."""
        self.id_of.take(self.cursors.values())

    def id_line(self) -> bytes:
        """An `id:` line without an event, which sets the position from which the client resumes."""
        return b"id: %b\n\n" % self.id_of()

    def _tell_created(self, cursor: Cursor) -> None:
        assert self._stream is not None
        # The cursor may belong to an earlier topic of this name, which was reported before.
        view = self._dispatcher.resolve(cursor.name)
        created = topic_created(cursor.name, cursor.epoch if view is None else view.epoch)
        self._stream.push(b"id: %b\n%b" % (self.id_of(), created))

    def _tell_left_out(self, names: Sequence[str]) -> None:
        assert self._stream is not None
        most = self._most
        message = f"the stream follows {most} topics, its maximum; it leaves out more that match"
        self._stream.push(error_frame(429, message, topics=names))
