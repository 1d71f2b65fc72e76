"""One view: the file that answers, the file that is being built, and the waiting queries.

A changed definition or a rebuild makes a new file. The old file continues and answers until the new
one has caught up; then the new file replaces it at once. If the topic is dropped or created again,
the view starts again with an empty file. Loop thread only; called by `service`.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import xxhash

from topics_server.engine.topic.topic import Topic
from topics_server.runtime.metrics import log
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import OnDelete, ViewDefinition
from topics_server.views.answers import ViewState, ViewStatus
from topics_server.views.build import Build, ViewContext
from topics_server.views.judge import RecoveredLogs, facts_of_log, is_ahead
from topics_server.views.messages import Answer, FileFacts, Open, Remove, Unreadable
from topics_server.views.processes import ProcessDied
from topics_server.views.workers.view_folder import files_in, remove_directory

_OPEN_SECONDS: Final = 60.0
# All deletes within this time cause one rebuild.
_DELETES_S: Final = 1.0
_RETRY_S: Final = 1.0

Listener = Callable[[], None]


class View:
    """A view of one topic name. `directory` has its files, which only this view's builds write.

    `is_started`: whether those files are opened. `recovered`: how the server started; after an
    unclean stop the files may lack deletes.
    """

    def __init__(
        self,
        topic_name: str,
        name: str,
        definition: ViewDefinition,
        directory: Path,
        context: ViewContext,
        *,
        recovered: RecoveredLogs,
    ) -> None:
        self.topic_name = topic_name
        self.name = name
        self.definition = definition
        self.active: Build | None = None
        self.next: Build | None = None
        self.rebuilds_total = 0
        self._directory = directory
        self._context = context
        self._store = context.store
        self._recovered = recovered
        # The number of deletes of the topic since the start; each build stores the number at its
        # beginning.
        self._deletes = 0
        self._numbers = count(1)
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._ticks = count()
        self._listeners: list[Listener] = []
        # The queries that wait for a file.
        self._callers: list[asyncio.Future[None]] = []
        self._endings: set[asyncio.Task[None]] = set()
        self._delete_timer: asyncio.TimerHandle | None = None
        self.is_started = False
        self._is_closed = False

    # -- files and topics ------------------------------------------------------------------

    async def start(self) -> None:
        """Open the existing files that fit the topic, and begin the missing builds."""
        files = await self._context.offload.run(partial(files_in, self._directory))
        if files:
            self._numbers = count(files[-1][0] + 1)
        for _, path in reversed(files):
            facts = await self._facts(path)
            if self._is_closed:
                return
            topic = self._topic()
            if topic is None or facts is None or not self._fits(facts, topic):
                await self._remove(path)
            elif facts.is_ready and self.active is None:
                # The file of an older definition answers until that of the current one has caught
                # up.
                self.active = self._resume(path, facts, topic)
            elif self._is_resumable(facts):
                self.next = self._resume(path, facts, topic)
            else:
                await self._remove(path)
        if self._is_closed:
            return
        self.is_started = True
        topic = self._topic()
        if topic is not None:
            self._begin_missing(topic)

    async def _facts(self, path: str) -> FileFacts | None:
        """The facts of a file; None if it is damaged or not a file of a view.

        A failed disk or a dead process shows nothing about the file, so this tries again.
        """
        while not self._is_closed:
            answer: Answer | None
            try:
                answer = await self._context.process.ask(
                    Open(path, self._context.max_bytes), seconds=_OPEN_SECONDS
                )
            except ProcessDied:
                answer = None
            if isinstance(answer, FileFacts):
                return answer
            if isinstance(answer, Unreadable):
                log.warning("rebuilding a file of view %s: %s", self.name, answer.message)
                return None
            log.warning("a file of view %s cannot be opened now: %r", self.name, answer)
            await asyncio.sleep(_RETRY_S)
        return None

    def _fits(self, facts: FileFacts, topic: Topic) -> bool:
        """Whether a file fits the current records of the topic."""
        if facts.topic_id != str(topic.topic_id) or facts.epoch != topic.epoch:
            return False
        log_facts = self._recovered.logs.get(topic.topic_id) or facts_of_log(topic)
        if is_ahead(facts, log_facts):
            self.note_ahead()
            return False
        return True

    def note_ahead(self) -> None:
        """A file of the view holds records that the log lost: rebuild the view."""
        log.warning(
            "rebuilding view %s of %s: it holds records that the log lost",
            self.name,
            self.topic_name,
        )
        self.rebuilds_total += 1

    def _is_resumable(self, facts: FileFacts) -> bool:
        """Whether a build that did not catch up may continue."""
        is_needed = self.active is None and self.next is None
        return is_needed and not self._is_stale(facts) and _same(facts.definition, self.definition)

    def _is_stale(self, facts: FileFacts) -> bool:
        """Whether a file may reflect deleted records although its view must not.

        After a kill it is unknown which deletes the file reflects.
        """
        if self.definition.on_delete is not OnDelete.REBUILD:
            return False
        was_kept = facts.definition.on_delete is not OnDelete.REBUILD
        return facts.is_stale or was_kept or not self._recovered.was_clean

    def _resume(self, path: str, facts: FileFacts, topic: Topic) -> Build:
        build = self._build(path, topic, facts.definition)
        # The file does not reflect deletes that happened while files were opened.
        build.deletes_seen = -1 if self._is_stale(facts) else 0
        build.start(facts)
        return build

    def _begin_missing(self, topic: Topic) -> None:
        active = self.active
        if self.next is not None and not _same(self.next.definition, self.definition):
            # The definition changed while the files were opened.
            self._end(self.next)
            self.next = None
        if active is None:
            self.active, self.next = self.next or self._new(topic), None
        elif self.next is None and not (
            _same(active.definition, self.definition) and active.deletes_seen >= 0
        ):
            self.next = self._new(topic)

    def _new(self, topic: Topic) -> Build:
        path = self._directory / f"{next(self._numbers)}.db"
        build = self._build(str(path), topic, self.definition)
        build.start(None)
        return build

    def _build(self, path: str, topic: Topic, definition: ViewDefinition) -> Build:
        return Build(
            path,
            self._context,
            self,
            topic=topic,
            definition=definition,
            deletes_seen=self._deletes,
        )

    def _topic(self) -> Topic | None:
        try:
            topic = self._store.topic(self.topic_name)
        except TopicsError:
            return None
        return None if topic.staging.has_drop else topic

    async def _remove(self, path: str) -> None:
        try:
            await self._context.process.ask(Remove(path), seconds=_OPEN_SECONDS)
        except ProcessDied:
            pass

    # -- changes ---------------------------------------------------------------------------

    def change(self, definition: ViewDefinition) -> None:
        """Change the definition; the current file answers until the new one has caught up."""
        old = self.definition
        self.definition = definition
        purges = definition.on_delete is OnDelete.REBUILD is not old.on_delete
        if purges or not _same(old, definition):
            self.rebuild()

    def rebuild(self) -> None:
        """Rebuild the view in a new file, while the current file answers."""
        topic = self._topic()
        if topic is None or not self._is_at_work:
            return
        self.rebuilds_total += 1
        if self.next is not None:
            self._end(self.next)
        if self.active is None or not self.active.is_ready:
            # There is no complete file that could answer meanwhile: start again at once.
            if self.active is not None:
                self._end(self.active)
            self.active, self.next = self._new(topic), None
        else:
            self.next = self._new(topic)

    @property
    def _is_at_work(self) -> bool:
        """Whether the files are opened; before that `start` handles every change itself."""
        return self.is_started and not self._is_closed

    def note_topic(self) -> None:
        """Begin a build if none is under way: the topic was created, maybe again."""
        topic = self._topic()
        if topic is None or not self._is_at_work:
            return
        if self.active is not None and self.active.topic_id != topic.topic_id:
            self._reset()
        self._begin_missing(topic)

    def note_delete(self) -> None:
        """Rebuild after a delete of records, if the definition requires that."""
        self._deletes += 1
        if self.definition.on_delete is not OnDelete.REBUILD or self._is_closed:
            return
        if self._delete_timer is None:
            loop = asyncio.get_running_loop()
            self._delete_timer = loop.call_later(_DELETES_S, self._rebuild_after_deletes)

    def _rebuild_after_deletes(self) -> None:
        self._delete_timer = None
        if self.definition.on_delete is not OnDelete.REBUILD or self._is_closed:
            return
        if self.next is not None or not self.is_started:
            # The build under way may have read deleted records; run the next rebuild after it.
            loop = asyncio.get_running_loop()
            self._delete_timer = loop.call_later(_DELETES_S, self._rebuild_after_deletes)
        elif self.active is None or self.active.deletes_seen < self._deletes:
            self.rebuild()

    async def skip(self, seq: int) -> bool:
        """Skip the record at which a build stopped; return whether a build had stopped."""
        for build in (self.next, self.active):
            if build is not None and await build.skip(seq):
                return True
        return False

    def _reset(self) -> None:
        for build in (self.active, self.next):
            if build is not None:
                self._end(build)
        self.active = self.next = None

    def _end(self, build: Build) -> None:
        task = asyncio.get_running_loop().create_task(build.remove())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def remove(self) -> None:
        """Delete the view's files."""
        self._is_closed = True
        if self._delete_timer is not None:
            self._delete_timer.cancel()
        self._reset()
        self._wake_all()
        await asyncio.gather(*self._endings, return_exceptions=True)
        for _, path in await self._context.offload.run(partial(files_in, self._directory)):
            await self._remove(path)
        await self._context.offload.run(partial(remove_directory, self._directory))

    async def close(self) -> None:
        """Stop the builds; the files stay, and stale ones are marked."""
        self._is_closed = True
        if self._delete_timer is not None:
            self._delete_timer.cancel()
        builds = [build for build in (self.active, self.next) if build is not None]
        await asyncio.gather(*(build.stop() for build in builds))
        if self.definition.on_delete is OnDelete.REBUILD:
            stale = [build for build in builds if build.deletes_seen < self._deletes]
            await asyncio.gather(*(build.mark_stale() for build in stale), return_exceptions=True)
        await asyncio.gather(*self._endings, return_exceptions=True)

    # -- callbacks of builds (`build.BuildEvents`) ------------------------------------------

    def opened(self, build: Build) -> None:
        """See `BuildEvents`."""
        if build is self.active:
            self._wake_callers()

    def moved(self, build: Build) -> None:
        """See `BuildEvents`."""
        if build is self.active:
            self._wake()

    def caught_up(self, build: Build) -> None:
        """See `BuildEvents`. The new file answers from then on."""
        if build is not self.next:
            self._notify()
            return
        old = self.active
        self.active, self.next = build, None
        if old is not None:
            self._end(old)
        self._wake()

    def lost_topic(self, build: Build) -> None:
        """See `BuildEvents`."""
        if build in (self.active, self.next):
            self._reset()
            self.note_topic()
            self._notify()

    def unusable(self, build: Build) -> None:
        """See `BuildEvents`. A view can always be rebuilt."""
        log.warning("the file of view %s cannot be used: rebuilding it", self.name)
        topic = self._topic()
        self._end(build)
        if build is self.next:
            self.next = None
        elif build is self.active:
            self.active = None
        if topic is not None and self._is_at_work:
            self._begin_missing(topic)

    @property
    def is_awaited(self) -> bool:
        """Whether a query waits for a record to be processed; live queries do not count."""
        return bool(self._waiters)

    # -- waiting ---------------------------------------------------------------------------

    @property
    def processed_seq(self) -> int:
        """The file that answers queries reflects every record up to this seq."""
        return 0 if self.active is None else self.active.processed_seq

    def etag(self, sql: str, seq: int | None = None) -> str:
        """The ETag of an answer to this query that reflects `seq`; by default, of an answer now.

        It contains everything that the rows depend on: the view, the topic, the file, the seq, the
        statement.
        """
        active = self.active
        seq = self.processed_seq if seq is None else seq
        build = "" if active is None else f"{active.topic_id:x}-{Path(active.path).stem}"
        statement = xxhash.xxh3_64_hexdigest(sql.encode())
        return f'"{self._directory.name}-{build}-{seq}-{statement}"'

    async def until_open(self, seconds: float) -> None:
        """Wait until there is a file to query, or until the time is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not (self.active is not None and self.active.is_open) and not self._is_closed:
            waiter: asyncio.Future[None] = loop.create_future()
            self._callers.append(waiter)
            try:
                async with asyncio.timeout_at(end):
                    await waiter
            except TimeoutError:
                return
            finally:
                self._callers.remove(waiter)

    def _wake_callers(self) -> None:
        for waiter in self._callers:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, seq: int, seconds: float) -> bool:
        """Wait until `seq` is processed; returns whether it is."""
        if self.processed_seq >= seq:
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (seq, next(self._ticks), waiter))
        if self.active is not None:
            self.active.want()
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            pass
        finally:
            waiter.cancel()
            self._forget_waiters()
        return self.processed_seq >= seq

    def _wake(self) -> None:
        waiters, processed_seq = self._waiters, self.processed_seq
        while waiters and waiters[0][0] <= processed_seq:
            _, _, waiter = heapq.heappop(waiters)
            if not waiter.done():
                waiter.set_result(None)
        self._notify()

    def _wake_all(self) -> None:
        for _, _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        self._wake_callers()
        self._notify()

    def _forget_waiters(self) -> None:
        """Remove finished waiters once most of them are finished."""
        waiting = [entry for entry in self._waiters if not entry[2].done()]
        if len(waiting) * 2 <= len(self._waiters):
            heapq.heapify(waiting)
            self._waiters = waiting

    def drain(self) -> None:
        """The server is stopping: answer all waiting queries."""
        self._wake_all()

    def listen(self, listener: Listener) -> None:
        """Call this listener whenever the view has moved."""
        self._listeners.append(listener)
        if self.active is not None:
            self.active.want()

    def unlisten(self, listener: Listener) -> None:
        """Remove a listener."""
        self._listeners.remove(listener)

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    # -- facts -----------------------------------------------------------------------------

    def state(self) -> ViewState:
        """The view's state. Raises `topic_not_found`."""
        topic = self._store.topic(self.topic_name)
        active, building = self.active, self.next
        failures = (build.failure for build in (building, active) if build is not None)
        failure = next((failure for failure in failures if failure is not None), None)
        status: ViewStatus = "building"
        if failure is not None:
            status = "failed"
        elif active is None:
            status = "waiting"
        elif active.is_ready and building is None:
            status = "ready"
        return ViewState(
            topic=self.topic_name,
            name=self.name,
            definition=self.definition,
            status=status,
            processed_seq=self.processed_seq,
            head_seq=topic.log.head_seq,
            known_from_seq=1 if active is None else active.known_from_seq,
            building_seq=None if building is None else building.processed_seq,
            failure=failure,
            bytes=sum(build.bytes for build in (active, building) if build is not None),
            applied_total=0 if active is None else active.applied_total,
            rebuilds_total=self.rebuilds_total,
        )

    def answering(self) -> Build:
        """The build that answers queries. Raises `topic_not_found`, `not_ready`."""
        if self.active is None or self._is_closed:
            self._store.topic(self.topic_name)
            raise TopicsError(
                Code.NOT_READY, f"view {self.name} is being made", {"view": self.name}
            )
        return self.active


def _same(one: ViewDefinition, other: ViewDefinition) -> bool:
    """Whether two definitions make the same tables; `queries` and `on_delete` may differ."""
    return one.schema == other.schema and one.apply == other.apply
