"""Where a session continues behind an event id (§7.4).

A session keeps its positions, so an id can only move them back, to the last frame that the client
received. An id holds the positions of the topics that the session had when it was sent. A topic of
a prefix that is missing from the id was created later, and is read from its beginning. Used by
`handlers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from topics_server.api.watch.cursor_ids import CursorPosition, decode_id
from topics_server.api.watch.growing import GrowingTopics
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.dispatcher import SubscriptionDispatcher
from topics_server.engine.subscribe.sessions import WatchSession
from topics_server.values.limits import U64_MAX

FIRST_EPOCH: Final = 1
# No topic has this id; it marks a reader of a dropped topic whose own id is no longer known.
NO_TOPIC_ID: Final = 0


def resume(
    dispatcher: SubscriptionDispatcher,
    session: WatchSession,
    topics: GrowingTopics,
    last_id: bytes,
) -> list[str]:
    """Move the cursors back to the client's last frame.

    Returns the topics of prefixes that are missing from the id. Cursors move forward only in a
    session that a restart restored, which may be behind its client: at most to the head. An id of
    another session changes nothing.
    """
    try:
        positions = decode_id(last_id.strip())
    except ValueError:
        return []
    cursors = list(session.cursors.values())
    for cursor in cursors:
        view = dispatcher.resolve(cursor.name) if cursor.is_waiting else None
        if view is not None:
            # The topic was created after the last checkpoint, or while no stream was open.
            cursor.arrive(view.topic_id, view.epoch)
    grown = [cursor for cursor in cursors if topics.has_prefix(cursor.name)]
    if isinstance(positions, dict):
        for cursor in cursors:
            if cursor.name in positions:
                # The JSON form refers only to the first topic of each name.
                is_first = cursor.epoch == FIRST_EPOCH
                topic_id = cursor.topic_id if is_first else NO_TOPIC_ID
                position = CursorPosition(topic_id, FIRST_EPOCH, positions[cursor.name])
                _go_back(dispatcher, cursor, position, may_advance=session.is_restored)
        return _begin_anew(cursor for cursor in grown if cursor.name not in positions)
    # Topics without a prefix come first in an id, and their number never changes.
    fixed = [cursor for cursor in cursors if not topics.has_prefix(cursor.name)]
    is_whole = len(positions) == len(cursors)
    if not is_whole and not (session.prefixes and len(positions) >= len(fixed)):
        return []
    known = {cursor.topic_id: index for index, cursor in enumerate(fixed)}
    # Several topics may share that id: it does not identify a session.
    known.pop(NO_TOPIC_ID, None)
    if any(
        known.get(position.topic_id, index) != index for index, position in enumerate(positions)
    ):
        return []  # the id of another session that shares topics with this one
    for cursor, position in zip(fixed, positions, strict=False):
        _go_back(dispatcher, cursor, position, may_advance=session.is_restored)
    return _resume_grown(
        dispatcher, grown, positions[len(fixed) :], may_advance=session.is_restored
    )


def _resume_grown(
    dispatcher: SubscriptionDispatcher,
    grown: Sequence[Cursor],
    positions: Sequence[CursorPosition],
    *,
    may_advance: bool,
) -> list[str]:
    """Move the cursors of topics with a prefix back. The id may hold them in any order."""
    left = {position.topic_id: position for position in positions}
    unknown: list[Cursor] = []
    for cursor in grown:
        position = left.pop(cursor.topic_id, None)
        if position is None:
            unknown.append(cursor)
        elif not cursor.is_waiting:
            _go_back(dispatcher, cursor, position, may_advance=may_advance)
    # Positions in deleted topics. A topic that was waited for has epoch 0.
    oldest = min((each.epoch for each in left.values() if each.epoch), default=U64_MAX)
    new: list[Cursor] = []
    for cursor in unknown:
        if oldest < cursor.epoch:
            # One of these positions may be in an earlier topic of this name. The reader is sent its
            # deletion, because that position has no meaning in the new topic.
            cursor.topic_id, cursor.epoch, cursor.seq = NO_TOPIC_ID, oldest, 0
        else:
            new.append(cursor)
    return _begin_anew(new)


def _begin_anew(cursors: Iterable[Cursor]) -> list[str]:
    """Move these cursors to the beginning, unless they wait for their topic.

    Returns their names.
    """
    found: list[str] = []
    for cursor in cursors:
        if not cursor.is_waiting:
            cursor.seq = 0
            found.append(cursor.name)
    return found


def _go_back(
    dispatcher: SubscriptionDispatcher,
    cursor: Cursor,
    position: CursorPosition,
    *,
    may_advance: bool,
) -> None:
    is_same = position.topic_id == cursor.topic_id
    if is_same and position.seq <= cursor.seq:
        cursor.seq = position.seq
    elif not is_same and position.epoch < cursor.epoch:
        # The client has read nothing of the current topic: deliver it from its start.
        cursor.topic_id, cursor.epoch, cursor.seq = position.topic_id, position.epoch, position.seq
    elif may_advance:
        view = dispatcher.resolve(cursor.name)
        if view is not None and view.topic_id == position.topic_id:
            seq = min(position.seq, view.head_seq)
            cursor.seq = max(cursor.seq, seq) if is_same else seq
            cursor.topic_id, cursor.epoch = view.topic_id, view.epoch
