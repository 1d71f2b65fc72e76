"""Where a live stream begins in each topic: at its request's start, or at an event id.

An event id holds the positions of all topics that the stream followed when the id was sent. So a
topic that is missing from the id was created later, and is read from its beginning. Used by
`stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from topics_server.api.context import StorePort
from topics_server.api.live.requests import LiveRequest
from topics_server.api.watch.cursor_ids import TOPICS_MAX as NAMED_MAX
from topics_server.api.watch.cursor_ids import Positions
from topics_server.engine.answers import ReadRequest
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.dispatcher import TopicView
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import U64_MAX

_FIRST_EPOCH: Final = 1
# No topic has this id; it marks a reader whose topic was dropped.
_NO_TOPIC_ID: Final = 0


async def started(
    store: StorePort, views: Mapping[str, TopicView], sent: LiveRequest
) -> dict[str, Cursor]:
    """The cursors of a stream without an id, for the topics that exist.

    Raises `topic_not_found` and `consumer_not_found` for a consumer that does not exist.
    """
    if sent.read_as is not None:
        (name,) = sent.topics
        seq = store.read_start(name, sent.read_as.consumer)
        return {name: Cursor(name, view.topic_id, view.epoch, seq) for name, view in views.items()}
    options = sent.options
    asked = ReadRequest(
        sent.from_seq,
        options.limit,
        options.max_bytes,
        filter=None if options.matcher is None else options.matcher.wanted,
        start=sent.start,
    )
    cursors: dict[str, Cursor] = {}
    for name, view in views.items():
        seq = view.head_seq if sent.tail else sent.from_seq
        if sent.start is not None:
            try:
                seq = await store.cursor_of(name, asked)
            except TopicsError as error:
                if error.code is not Code.TOPIC_NOT_FOUND:
                    raise
                # The topic was dropped meanwhile; the stream reports that.
        cursors[name] = Cursor(name, view.topic_id, view.epoch, seq)
    return cursors


def resumed(
    views: Mapping[str, TopicView],
    topics: Sequence[str],
    positions: Positions,
    is_followed: Callable[[str], bool],
) -> dict[str, Cursor]:
    """The cursors of a stream that continues behind an event id.

    `is_followed` returns whether a name has a prefix of the stream. A cursor in a deleted topic
    makes the stream report the deletion. A named topic that does not exist, and has no position in
    the id, gets no cursor.
    """
    cursors = {name: Cursor(name, view.topic_id, view.epoch, 0) for name, view in views.items()}
    if isinstance(positions, dict):
        named = 0
        for name, seq in positions.items():
            view = views.get(name)
            if view is not None:
                # The form with names refers only to the first topic of each name.
                topic_id = view.topic_id if view.epoch == _FIRST_EPOCH else _NO_TOPIC_ID
                cursors[name] = Cursor(name, topic_id, _FIRST_EPOCH, seq)
            elif name in topics or (named < NAMED_MAX and is_followed(name)):
                named += 1
                cursors[name] = Cursor(name, _NO_TOPIC_ID, _FIRST_EPOCH, seq)
        return cursors
    by_topic = {position.topic_id: position for position in positions}
    kept = by_topic.keys() & {view.topic_id for view in views.values()}
    for view_name, view in views.items():
        if view.topic_id in kept:
            cursors[view_name].seq = by_topic[view.topic_id].seq
    # Positions in deleted topics. A topic that was waited for has epoch 0.
    gone = (each.epoch for each in positions if each.epoch and each.topic_id not in kept)
    oldest = min(gone, default=U64_MAX)
    for name, view in views.items():
        if view.topic_id not in kept and oldest < view.epoch:
            # One of these positions may be in an earlier topic of this name. The reader is sent its
            # deletion, because that position has no meaning in the new topic.
            cursors[name] = Cursor(name, _NO_TOPIC_ID, oldest, 0)
    if len(positions) >= len(topics):
        # The named topics come first in an id, in the order of the request.
        for name, position in zip(topics, positions, strict=False):
            if name not in views and position.epoch and position.topic_id not in kept:
                cursors[name] = Cursor(name, _NO_TOPIC_ID, position.epoch, position.seq)
    return cursors
