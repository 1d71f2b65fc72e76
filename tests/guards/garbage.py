"""Guards of decision 0352: an error keeps no frames, and what is over forgets its owner."""

from __future__ import annotations

from typing import Final

from tests.guards.guard import Guard, guards

GARBAGE: Final[list[Guard]] = [
    *guards(
        "queue/dispatch/alarm.py",
        "unit/queue/test_service_garbage.py",
        (
            "an alarm that is over forgets its callback",
            "self._timer = self._callback = None",
            "self._timer = None",
        ),
    ),
    *guards(
        "queue/service.py",
        "unit/queue/test_service_garbage.py",
        (
            "a waiting claim that ends forgets its poll",
            "            del poll\n",
            "            pass\n",
        ),
    ),
    *guards(
        "queue/push.py",
        "unit/queue/test_push.py",
        (
            "a push stream that is over forgets its connection",
            "self._deliver, self._tell = _deliver_to_nobody, _tell_nobody",
            "pass",
        ),
    ),
    *guards(
        "engine/background/large_appends.py",
        "unit/engine/background/test_append_decoder.py",
        (
            "a large append that is refused forgets its futures",
            "del under_way, finished",
            "pass",
        ),
    ),
    *guards(
        "views/feed.py",
        "unit/views/test_feed.py",
        (
            "a failed call of a view forgets its future",
            "            del answer\n",
            "            pass\n",
        ),
        (
            "an error that several calls of a view get has no traceback",
            "_error_for_each(error.with_traceback(None), len(waiting))",
            "_error_for_each(error, len(waiting))",
        ),
    ),
    *guards(
        "views/processes.py",
        "unit/views/test_processes.py",
        (
            "a failed request to a view's process forgets its task",
            "del under_way",
            "pass",
        ),
    ),
    *guards(
        "engine/read/segment_reader.py",
        "unit/engine/read/test_segment_reader.py",
        (
            "a search that fails forgets the error that it raises",
            "so the frame must not refer to the error.\n"
            "                raise failed.pop(segment_id)",
            "\n                raise failed[segment_id]",
        ),
        (
            "a search of several segments that fails forgets the error that it raises",
            "            if self._has(topic, segment_id):\n"
            "                self.note_broken(topic_id, segment_id)\n"
            "                raise failed.pop(segment_id)",
            "            if self._has(topic, segment_id):\n"
            "                self.note_broken(topic_id, segment_id)\n"
            "                raise failed[segment_id]",
        ),
    ),
    *guards(
        "api/watch/broadcast.py",
        "unit/api/watch/test_broadcast.py",
        (
            "a closed stream forgets its owner",
            "self.owner = self.on_taken = self._on_gone = None",
            "self.on_taken = self._on_gone = None",
        ),
    ),
    *guards(
        "engine/subscribe/dispatcher.py",
        "unit/api/watch/test_broadcast.py",
        (
            "the error of a page that followers wait for has no traceback",
            "error = failed.with_traceback(None)",
            "error = failed",
        ),
    ),
    *guards(
        "http/websocket.py",
        "unit/http/test_connection.py",
        (
            "a lost WebSocket forgets the error of its parser",
            "self.conn.parser_exc = None",
            "pass",
        ),
    ),
    *guards(
        "api/front_door.py",
        "unit/api/test_direct.py",
        (
            "a refused request keeps no frames",
            "if isinstance(error, TopicsError):\n        forget_frames(error)",
            "if isinstance(error, TopicsError):\n        pass",
        ),
        (
            "a request that the storage refuses keeps no frames",
            "if isinstance(error, StorageError):\n        forget_frames(error)",
            "if isinstance(error, StorageError):\n        pass",
        ),
        (
            "a defect keeps no frames once it is logged",
            "exc_info=error)\n    forget_frames(error)",
            "exc_info=error)",
        ),
    ),
    *guards(
        "values/errors.py",
        "unit/values/test_errors.py",
        (
            "an answered error has no traceback",
            "found.__traceback__ = None",
            "pass",
        ),
        (
            "the errors before an answered error have no traceback",
            "found = found.__context__",
            "found = None",
        ),
    ),
    *guards(
        "api/request.py",
        "unit/api/test_request.py",
        (
            "a failed wait of a request forgets its task",
            "        del coming\n",
            "        pass\n",
        ),
    ),
    *guards(
        "api/streams/live_reader.py",
        "unit/api/streams/test_live_reader.py",
        (
            "a live reader that fails forgets its task",
            "            del telling\n",
            "            pass\n",
        ),
        (
            "a stalled reader forgets its wait",
            "            del waiting\n",
            "            pass\n",
        ),
    ),
    *guards(
        "api/streams/whole_reader.py",
        "unit/api/streams/test_live_reader.py",
        (
            "a reader of whole answers that fails forgets its task",
            "            del telling\n",
            "            pass\n",
        ),
    ),
    *guards(
        "engine/commit/transfers.py",
        "unit/engine/commit/test_transfers.py",
        (
            "each waiter of a failed move gets its own error",
            "raise TopicsError(error.code, error.message, error.detail)",
            "raise error",
        ),
        (
            "each waiter of a move with an unknown outcome gets its own error",
            "raise OutcomeUnknown(error)",
            "raise error",
        ),
    ),
    *guards(
        "wal/journal/journal.py",
        "storage/journal/test_shard.py",
        (
            "a failed sync of all shards forgets their results",
            "        del results\n",
            "        pass\n",
        ),
        (
            "a failed sync of all shards forgets the error that it raises",
            "raise errors.pop(0)",
            "raise errors[0]",
        ),
    ),
    *guards(
        "wal/journal/wal_writer.py",
        "storage/journal/test_shard.py",
        (
            "a failed wait for a sync forgets its future",
            "            del future\n",
            "            pass\n",
        ),
        (
            "an end mark follows each group that the loop writes",
            "            self.tail.note_end()\n",
            "            pass\n",
        ),
        (
            "the loop writes no end mark beside the cut of a failed write",
            "if not self.tail.is_noted and not isinstance(self.job, CutBack):",
            "if not self.tail.is_noted:",
        ),
        (
            "a group gets its end mark also if one behind it fails beside a sync",
            "not self.tail.is_noted and not isinstance(self.job, CutBack)",
            "not self.tail.is_noted and self.state is not WriterState.FAILED",
        ),
    ),
    *guards(
        "api/views/live.py",
        "unit/api/views/test_live.py",
        (
            "a live query that fails forgets its task",
            "            del telling\n",
            "            pass\n",
        ),
    ),
    *guards(
        "routers/pump.py",
        "unit/routers/test_pump.py",
        (
            "the error of a router's source has no traceback",
            "failure = error.with_traceback(None)",
            "failure = error",
        ),
    ),
    *guards(
        "http/sockets.py",
        "unit/api/watch/test_send_queue.py",
        (
            "a failed receive under another server forgets its task",
            "        del leaving\n",
            "        pass\n",
        ),
    ),
]
