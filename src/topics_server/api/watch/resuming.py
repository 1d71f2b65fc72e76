"""Where a session goes on behind an event id (§7.4).

A session knows its positions, so an id only leads back to what its client has received. An id has
the positions of the topics that the session had then: one of a prefix that it does not know was
created since, and is read from its beginning. Used by `handlers`.
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
# The id of no topic: for a reader of a dropped topic whose id is no longer known.
NO_TOPIC_ID: Final = 0


def resume(
    dispatcher: SubscriptionDispatcher,
    session: WatchSession,
    topics: GrowingTopics,
    last_id: bytes,
) -> list[str]:
    """Go back to the client's last frame; never forward.

    Returns the topics of prefixes that the id does not know. Exception: a session that a restart
    restored may be behind its client; it catches up, at most to the head. An id of another session
    changes nothing.
    """
    try:
        positions = decode_id(last_id.strip())
    except ValueError:
        return []
    cursors = list(session.cursors.values())
    for cursor in cursors:
        view = dispatcher.resolve(cursor.name) if cursor.is_waiting else None
        if view is not None:
            # It was created after the last checkpoint, or while no stream was open.
            cursor.arrive(view.topic_id, view.epoch)
    grown = [cursor for cursor in cursors if topics.has_prefix(cursor.name)]
    if isinstance(positions, dict):
        for cursor in cursors:
            if cursor.name in positions:
                # The JSON form means the first topic of a name only.
                is_first = cursor.epoch == FIRST_EPOCH
                topic_id = cursor.topic_id if is_first else NO_TOPIC_ID
                position = CursorPosition(topic_id, FIRST_EPOCH, positions[cursor.name])
                _go_back(dispatcher, cursor, position, may_advance=session.is_restored)
        return _begin_anew(cursor for cursor in grown if cursor.name not in positions)
    # Topics without a prefix come first, and there are always as many of them.
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
        return []  # of another session, with topics of this one
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
    """Go back in the topics of prefixes, in whatever order the id has them."""
    left = {position.topic_id: position for position in positions}
    unknown: list[Cursor] = []
    for cursor in grown:
        position = left.pop(cursor.topic_id, None)
        if position is None:
            unknown.append(cursor)
        elif not cursor.is_waiting:
            _go_back(dispatcher, cursor, position, may_advance=may_advance)
    # Of topics that are gone; those that were awaited have epoch 0.
    oldest = min((each.epoch for each in left.values() if each.epoch), default=U64_MAX)
    new: list[Cursor] = []
    for cursor in unknown:
        if oldest < cursor.epoch:
            # One of them may be an earlier topic of this name: the reader learns that it was
            # deleted, as its position says nothing of the new one.
            cursor.topic_id, cursor.epoch, cursor.seq = NO_TOPIC_ID, oldest, 0
        else:
            new.append(cursor)
    return _begin_anew(new)


def _begin_anew(cursors: Iterable[Cursor]) -> list[str]:
    """Read these from their beginning, unless they still wait; returns their names."""
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
        # It never saw the current topic: deliver that from its start.
        cursor.topic_id, cursor.epoch, cursor.seq = position.topic_id, position.epoch, position.seq
    elif may_advance:
        view = dispatcher.resolve(cursor.name)
        if view is not None and view.topic_id == position.topic_id:
            seq = min(position.seq, view.head_seq)
            cursor.seq = max(cursor.seq, seq) if is_same else seq
            cursor.topic_id, cursor.epoch = view.topic_id, view.epoch
