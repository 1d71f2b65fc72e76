"""A request that waits for its turn under pressure.

It has no task. The throttle calls `begin`, so that the work counts towards the throttle's current
slice. `begin` must not wait for `request.gone`: on the direct way `gone` never returns. Called by
the handlers of records, queues and streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from topics_server.api.context import ServerState
from topics_server.api.request import Answer, Pending, Request, Response
from topics_server.engine.pressure.throttle import task_cost_ms
from topics_server.values.errors import StorageError, TopicsError

Begin = Callable[[Request], "Answer | Pending | Coroutine[Any, Any, Answer]"]


class WaitingTurn:
    """A request in the wait queue of a topic; `begin` answers it once it has its turn.

    `must_run`: the request is never refused.

    This object and its callback refer to each other. It drops finished parts at once, because the
    garbage collector does not examine old objects.
    """

    __slots__ = ("_answer", "_begin", "_callback", "_request", "_throttle", "_waiting")

    def __init__(
        self,
        state: ServerState,
        request: Request,
        topic: str,
        begin: Begin,
        *,
        must_run: bool = False,
    ) -> None:
        throttle = self._throttle = state.throttle
        self._request: Request | None = request
        self._begin = begin
        self._callback: Callable[[], object] | None = None
        self._answer: Callable[[], Any] | None = None
        self._waiting = throttle.enqueue(topic, len(request.body), must_run=must_run)
        self._waiting.over = self._over

    def when_resolved(self, callback: Callable[[], object]) -> None:
        """Call `callback` once there is an answer."""
        self._callback = callback

    def _over(self) -> None:
        waiting = self._waiting
        request, self._request = self._request, None
        callback, self._callback = self._callback, None
        assert request is not None
        assert callback is not None
        if waiting.is_refused:
            self._answer = partial(_refuse, self._throttle.refusal(waiting))
            callback()
            return
        request.throttle_wait_ms = waiting.waited_ms
        try:
            answer = self._begin(request)
        except Exception as error:
            # Nothing may pass from here to the throttle: it has other requests to serve.
            if isinstance(error, TopicsError | StorageError):
                error = error.with_traceback(None)
            self._answer = partial(_refuse, error)
            callback()
            return
        if isinstance(answer, Response):
            # The usual case first: looking for a coroutine takes longer.
            self._answer = lambda: answer
            callback()
        elif isinstance(answer, Pending):
            self._answer = answer.answer
            answer.when_resolved(callback)
        elif isinstance(answer, Coroutine):
            # The task runs after the throttle's slice, which could start any number of them.
            waiting.cost_ms = task_cost_ms(waiting.size)
            general = asyncio.ensure_future(answer)
            self._answer = general.result
            general.add_done_callback(lambda _: callback())
        else:
            self._answer = lambda: answer
            callback()

    def answer(self) -> Response:
        """The answer. Raises the request's error."""
        answer, self._answer = self._answer, None
        assert answer is not None
        try:
            response: Response = answer()
            return response
        finally:
            # Break a cycle: an error refers to the frames that it passed, and `answer` in them
            # refers to the error.
            del answer


def _refuse(error: Exception) -> Response:
    try:
        raise error
    finally:
        del error
