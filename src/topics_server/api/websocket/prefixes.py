"""The prefixes that one socket follows, with their existing topics and those made later.

A later topic is announced by `topic_created` and read from its first record, with the options of
its prefix; if it has several prefixes, with the options of the one subscribed first. Beyond the
most topics of a socket, an `error` message names the topics that are left out. When a followed
topic is deleted or unsubscribed, one of those is added, from its first record. Loop thread only.
Used by `handlers`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from topics_server.api.watch.broadcast import BroadcastStream
from topics_server.api.watch.growing import NAMED_MAX, matching_names
from topics_server.api.watch.requests import Start
from topics_server.api.websocket import frames as ws_frames
from topics_server.auth.api_keys import Caller
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.dispatcher import SubscriptionDispatcher
from topics_server.engine.subscribe.subscription import SubscriptionOptions
from topics_server.values.errors import clipped, invalid
from topics_server.values.limits import LIVE_PREFIXES_MAX


class SocketPrefixes:
    """The topics that one socket follows by prefix.

    `most`: the limit of followed topics, those subscribed by name included. `left_out`: some of the
    matching topics beyond the limit. `brought`: the followed topics that no command named.
    """

    __slots__ = ("_caller", "_dispatcher", "_most", "_options", "_stream", "brought", "left_out")

    def __init__(
        self,
        dispatcher: SubscriptionDispatcher,
        caller: Caller,
        stream: BroadcastStream,
        most: int,
    ) -> None:
        self.brought: Final[set[str]] = set()
        self.left_out: list[str] = []
        self._dispatcher = dispatcher
        self._caller = caller
        self._stream = stream
        self._most = most
        # The options by prefix, in the order of the commands.
        self._options: dict[str, SubscriptionOptions] = {}

    def check(self, prefixes: Collection[str]) -> None:
        """Raise `invalid_request` if the socket may not follow these prefixes, too."""
        for prefix in prefixes:
            if prefix in self._options:
                message = f'prefix "{clipped(prefix)}" is subscribed to: unsubscribe it first'
                raise invalid(message, f"prefixes.{prefix}")
        if len(self._options) + len(prefixes) > LIVE_PREFIXES_MAX:
            message = f"at most {LIVE_PREFIXES_MAX} prefixes are followed at once"
            raise invalid(message, "prefixes")

    def follows(self, prefix: str) -> bool:
        """Whether exactly this prefix is followed."""
        return prefix in self._options

    def prefix_of(self, name: str, without: Collection[str] = ()) -> str | None:
        """The followed prefix that matches this name, if any."""
        for prefix in self._options:
            if name.startswith(prefix) and prefix not in without:
                return prefix
        return None

    def choose(self, prefixes: Mapping[str, Start], followed: Collection[str]) -> dict[str, Start]:
        """The topics that new prefixes add to the followed ones, and the start of each.

        Fills `left_out`.
        """
        if not prefixes:
            return {}
        room = max(0, self._most - len(followed))
        names = matching_names(
            self._dispatcher, self._caller, tuple(prefixes), followed, room + NAMED_MAX
        )
        self.left_out = names[room:]
        return {
            name: next(start for prefix, start in prefixes.items() if name.startswith(prefix))
            for name in names[:room]
        }

    def begin(self, prefixes: Iterable[str], options: SubscriptionOptions) -> None:
        """Follow the topics that are created with these prefixes from now on."""
        for prefix in prefixes:
            self._options[prefix] = options
            self._dispatcher.creations.watch(prefix, self.created)

    def end(self, prefixes: Iterable[str]) -> None:
        """Stop following these prefixes, and the topics that no other prefix and no command
        names.
        """
        for prefix in prefixes:
            del self._options[prefix]
            self._dispatcher.creations.stop_watching(prefix, self.created)
        for name in [name for name in self.brought if self.prefix_of(name) is None]:
            self.brought.discard(name)
            self._stream.unfollow(name)

    def stop(self) -> None:
        """Stop following all prefixes: the socket is gone."""
        for prefix in self._options:
            self._dispatcher.creations.stop_watching(prefix, self.created)
        self._options.clear()

    def created(self, name: str) -> None:
        """Called for a topic that was created, or found, with one of the prefixes."""
        stream = self._stream
        if stream.is_over or name in stream.cursors or name in self.left_out:
            return
        view, prefix = self._dispatcher.resolve(name), self.prefix_of(name)
        if view is None or prefix is None or not self._caller.may_name(name):
            return
        if len(stream.cursors) >= self._most:
            if len(self.left_out) < NAMED_MAX:
                self.left_out.append(name)
                stream.push(ws_frames.left_out(self._most, [name]))
            return
        self.brought.add(name)
        stream.push(ws_frames.topic_created(name, view.epoch))
        stream.follow(Cursor(name, view.topic_id, view.epoch, 0), self._options[prefix])

    def fill(self) -> None:
        """Called when a topic was deleted or unsubscribed: follow other matching topics, if there
        is room.
        """
        self.left_out.clear()
        if self._options:
            followed = self._stream.cursors
            room = max(0, self._most - len(followed))
            prefixes = tuple(self._options)
            for name in matching_names(self._dispatcher, self._caller, prefixes, followed, room):
                self.created(name)
