"""The view service: define, query, follow, rebuild, delete.

Definitions are journaled and durable before a call returns; files are made by the apply process and
read by query processes. A query with `after` waits until the view has processed that record. One
change of the set of views at a time. Called by `api/views/handlers` and by the wiring; loop thread
only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from topics_server.engine.commit.gates import gate_of_service
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.ticket_waits import applied
from topics_server.engine.ports import Clock
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.quotas import limit_reached
from topics_server.engine.topic.registry import own_path
from topics_server.runtime.logging import log_defect
from topics_server.runtime.metrics import LatencyHistogram, log
from topics_server.values.entries import (
    Entry,
    RecordsAppended,
    RecordsDeleted,
    TopicPut,
    ViewDeleted,
    ViewEntry,
    ViewPut,
)
from topics_server.values.errors import Code, TopicsError, invalid
from topics_server.values.limits import (
    VIEW_ROWS_BYTES_MAX,
    VIEW_ROWS_MAX,
    VIEW_WAITING_MAX,
)
from topics_server.values.model import OnDelete, TopicType, ViewDefinition
from topics_server.views.answers import ViewOutcome, ViewRows, ViewState
from topics_server.views.build import ViewContext
from topics_server.views.judge import RecoveredLogs
from topics_server.views.messages import (
    Answer,
    Check,
    DiskTrouble,
    Moved,
    QueryRows,
    SqlRefused,
    Unreadable,
    ViewQuery,
)
from topics_server.views.processes import ProcessDied, Querying
from topics_server.views.view import View
from topics_server.views.view_table import ViewRow, ViewTable
from topics_server.views.workers.view_folder import tidy

_CHECK_SECONDS: Final = 30.0
# A process that exceeds its time by this much is killed.
_GRACE_S: Final = 2.0
# How often a query is repeated if the view's file was replaced meanwhile.
_TRIES_MAX: Final = 3


class ViewSettings(Protocol):
    """The settings of views; `settings.Settings` has them. 0 is unlimited for counts."""

    @property
    def max_views(self) -> int:
        """The maximum of views of the server."""
        ...

    @property
    def max_views_per_topic(self) -> int:
        """The maximum of views of one topic."""
        ...

    @property
    def max_topics_per_prefix(self) -> int:
        """The limit of topics, and of views, for each prefix of a key."""
        ...

    @property
    def view_max_bytes(self) -> int:
        """The maximum size of one view's file."""
        ...

    @property
    def view_after_ms(self) -> int:
        """How long a query waits for `after`, in ms."""
        ...

    @property
    def view_query_ms(self) -> int:
        """How long one query may run, in ms."""
        ...

    @property
    def view_query_processes(self) -> int:
        """The number of processes that answer queries."""
        ...


class Views:
    """The views of a server that has recovered."""

    def __init__(
        self,
        table: ViewTable,
        directory: Path,
        context: ViewContext,
        queries: Querying,
        commits: CommitPipeline,
        clock: Clock,
        settings: ViewSettings,
        recovered: RecoveredLogs,
        prefixes: Callable[[], frozenset[str]],
    ) -> None:
        self._table = table
        self._directory = directory
        self._context = context
        self._store = context.store
        self._commits = commits
        self._clock = clock
        self._settings = settings
        self._views: dict[int, View] = {}
        self._by_topic: dict[str, list[View]] = {}
        self._changing = asyncio.Lock()
        self._process = context.process
        self._pool = queries
        self._waiting = 0
        self._recovered = recovered
        self._prefixes = prefixes
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.queries_total = 0
        self.timeouts_total = 0
        self.query_latency = LatencyHistogram()

    def __len__(self) -> int:
        return len(self._table)

    # -- its life --------------------------------------------------------------------------

    def start(self) -> None:
        """Continue every view from its file's position. Refuses no start; does not wait."""
        self._table.on_put = self._put_row
        self._table.on_gone = self._gone_row
        self._commits.change_observers.append(self.observe)
        self._commits.delete_observers.append(self.observe)
        self._spawn(self._tidy())
        for row in self._table:
            self._put_row(row)
            if row.view_id in self._recovered.ahead:
                self._views[row.view_id].note_ahead()
        if len(self._table):
            self._spawn(self._pool.warm())

    async def _tidy(self) -> None:
        """Remove the folders of deleted views; later views have higher ids."""
        known = {row.view_id for row in self._table}
        gone = set(range(1, self._table.next_view_id)) - known
        if not gone:
            return
        try:
            names = {str(view_id) for view_id in gone}
            await self._context.offload.run(partial(tidy, self._directory, names))
        except OSError as error:
            log.warning("the folder of the views cannot be read: %s", error)

    def _put_row(self, row: ViewRow) -> None:
        view = self._views.get(row.view_id)
        if view is not None:
            view.change(row.definition)
            return
        view = self._views[row.view_id] = View(
            row.topic,
            row.name,
            row.definition,
            self._directory / str(row.view_id),
            self._context,
            recovered=self._recovered,
        )
        self._by_topic.setdefault(row.topic, []).append(view)
        self._spawn(view.start())

    def _gone_row(self, row: ViewRow) -> None:
        view = self._views.pop(row.view_id, None)
        if view is None:
            return
        views = self._by_topic[row.topic]
        views.remove(view)
        if not views:
            del self._by_topic[row.topic]
        self._spawn(view.remove())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        log_defect(task)

    def drain(self) -> None:
        """Answer all waiting queries now: the server is stopping."""
        self._is_closed = True
        for view in self._views.values():
            view.drain()

    async def close(self) -> None:
        """Stop reading and applying, then end the processes."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(view.close() for view in self._views.values()))
        await asyncio.gather(self._process.close(), self._pool.close())

    def observe(self, lsn: int, entry: Entry, applied: Applied) -> None:
        """Observe an applied entry: created topics, and deletes of records."""
        if not self._by_topic:
            return
        if isinstance(entry, RecordsAppended):
            if entry.creation is not None:
                self._note_topic(entry.creation.name)
        elif isinstance(entry, TopicPut):
            if entry.created:
                self._note_topic(entry.name)
        elif isinstance(entry, RecordsDeleted):
            topic = self._store.topic_of(entry.topic_id)
            for view in self._by_topic.get("" if topic is None else topic.name, ()):
                view.note_delete()

    def _note_topic(self, name: str) -> None:
        # Call the views a turn later, when the topic can be found.
        loop = asyncio.get_running_loop()
        for view in self._by_topic.get(name, ()):
            loop.call_soon(view.note_topic)

    # -- looking ---------------------------------------------------------------------------

    def view(self, topic: str, name: str) -> View:
        """A view. Raises `topic_not_found`, `view_not_found`."""
        row = self._table.find(topic, name)
        view = None if row is None else self._views.get(row.view_id)
        if view is None:
            self._store.topic(topic)
            raise TopicsError(
                Code.VIEW_NOT_FOUND,
                f'topic "{topic}" has no view "{name}"',
                {"topic": topic, "view": name},
            )
        return view

    def get(self, topic: str, name: str) -> ViewState:
        """A view's state. Raises `topic_not_found`, `view_not_found`."""
        return self.view(topic, name).state()

    def of_topic(self, topic: str) -> list[ViewState]:
        """The views of a topic in order of their names. Raises `topic_not_found`."""
        self._store.topic(topic)
        rows = self._table.of_topic(topic)
        return [self._views[row.view_id].state() for row in rows if row.view_id in self._views]

    def states(self) -> Iterator[ViewState]:
        """The states of all views whose topic exists, for metrics."""
        for view in list(self._views.values()):
            try:
                yield view.state()
            except TopicsError:
                continue  # its topic does not exist now

    # -- changing --------------------------------------------------------------------------

    async def put(self, topic: str, name: str, definition: ViewDefinition) -> ViewOutcome:
        """Create a view, or change its definition; durable before this returns.

        Raises `TopicsError`, and then changes nothing: `topic_not_found`, `query_failed` for SQL
        that is wrong or not allowed, `throttled` for too many views.
        """
        async with self._changing:
            self._check_topic(topic, definition)
            row = self._table.find(topic, name)
            if row is not None and row.definition == definition:
                return ViewOutcome(created=False, changed=False, definition=definition)
            if row is None:
                self._check_room(topic)
            if not len(self._table):
                self._spawn(self._pool.warm())
            await self._check_sql(definition)
            self._check_topic(topic, definition)
            view_id = self._table.next_view_id if row is None else row.view_id
            entry = ViewPut(view_id, topic, name, self._clock.now_ms(), definition)
            await self._commit(entry)
            return ViewOutcome(created=row is None, changed=row is not None, definition=definition)

    def _check_topic(self, name: str, definition: ViewDefinition) -> None:
        topic = self._store.topic(name)
        if definition.on_delete is OnDelete.REBUILD and topic.config.type is TopicType.QUEUE:
            raise invalid(
                "on_delete must be keep on a queue: every ack deletes a record", "on_delete"
            )

    def _check_room(self, topic: str) -> None:
        settings = self._settings
        for limit, most, there in (
            ("max_views", settings.max_views, len(self._table)),
            ("max_views_per_topic", settings.max_views_per_topic, len(self._table.of_topic(topic))),
        ):
            if most and there >= most:
                raise TopicsError(
                    Code.THROTTLED,
                    "the server has reached its limit of views",
                    {"limit": limit, "max": most},
                )
        self._check_prefixes(topic)

    def _check_prefixes(self, topic: str) -> None:
        """Raise `throttled` if a prefix of a key has as many views as it may have topics."""
        most = self._settings.max_topics_per_prefix
        own = self._path_of(topic)
        for prefix in sorted(self._prefixes()) if most else ():
            if own.startswith(prefix):
                there = sum(self._path_of(row.topic).startswith(prefix) for row in self._table)
                if there >= most:
                    message = f'the prefix "{prefix}" has reached its limit of views'
                    raise limit_reached("max_topics_per_prefix", message, most, prefix)

    def _path_of(self, topic: str) -> str:
        """The path that key prefixes are compared with: a stream's own path, else the name."""
        try:
            return own_path(self._store.topic(topic))
        except TopicsError:
            return topic

    async def _check_sql(self, definition: ViewDefinition) -> None:
        try:
            answer = await self._process.ask(Check(definition), seconds=_CHECK_SECONDS)
        except ProcessDied as died:
            raise TopicsError(Code.QUERY_FAILED, str(died), {"reason": "time"}) from None
        if isinstance(answer, SqlRefused):
            raise _refusal(answer)

    async def delete(self, topic: str, name: str) -> bool:
        """Delete a view with its files; returns whether it existed."""
        async with self._changing:
            row = self._table.find(topic, name)
            if row is None:
                return False
            await self._commit(ViewDeleted(row.view_id, topic, name, self._clock.now_ms()))
            return True

    async def _commit(self, entry: ViewEntry) -> None:
        ticket = self._commits.submit(entry, gate_of_service(entry), self._table, urgent=True)
        await applied(ticket)

    async def rebuild(self, topic: str, name: str, *, skip_seq: int | None) -> ViewState:
        """Rebuild a view, or skip the record at which it stopped. Raises `TopicsError`."""
        view = self.view(topic, name)
        if not view.is_started:
            raise TopicsError(Code.NOT_READY, f"view {name} is still being opened", {"view": name})
        if skip_seq is None:
            view.rebuild()
        elif not await view.skip(skip_seq):
            raise invalid("skip must be the seq at which the view stopped", "skip")
        return view.state()

    # -- querying --------------------------------------------------------------------------

    async def query(
        self, topic: str, name: str, sql: str, params: Any, *, after: int | None = None
    ) -> ViewRows:
        """Rows of a query; with `after` they reflect that record.

        Raises `TopicsError`: `view_timeout` if the view does not reach the record in time,
        `query_failed` for SQL that is wrong, not allowed or exceeds a limit, `throttled` if too
        many wait.
        """
        view = self.view(topic, name)
        if self._waiting >= VIEW_WAITING_MAX:
            raise TopicsError(
                Code.THROTTLED,
                "too many queries of views wait",
                {"limit": "view_queries", "max": VIEW_WAITING_MAX},
            )
        self._waiting += 1
        try:
            if after is not None:
                await self._wait_for(view, after)
            began_ms = self._clock.monotonic_ms()
            rows = await self._rows(view, sql, params, after or 0)
            self.query_latency.observe((self._clock.monotonic_ms() - began_ms) * 1000)
            return rows
        finally:
            self._waiting -= 1

    async def _wait_for(self, view: View, after: int) -> None:
        if await view.wait_for(after, self._settings.view_after_ms / 1000):
            return
        if self._is_closed:
            raise TopicsError(Code.SHUTTING_DOWN, "the server is shutting down")
        self.timeouts_total += 1
        current = view.processed_seq
        raise TopicsError(
            Code.VIEW_TIMEOUT,
            f"Timeout waiting for view {view.name} to catch up "
            f"(target: {after}, current: {current})",
            {"view": view.name, "target": after, "current": current},
        )

    async def _rows(self, view: View, sql: str, params: Any, after: int) -> ViewRows:
        settings = self._settings
        answer: Answer = Moved()
        for _ in range(_TRIES_MAX):
            self._store.topic(view.topic_name)
            await view.until_open(settings.view_after_ms / 1000)
            query = ViewQuery(
                view.answering().path,
                sql,
                params,
                settings.view_query_ms,
                VIEW_ROWS_MAX,
                VIEW_ROWS_BYTES_MAX,
            )
            try:
                seconds = settings.view_query_ms / 1000 + _GRACE_S
                answer = await self._pool.ask(query, seconds=seconds)
            except ProcessDied as died:
                reason = "time" if died.was_late else "memory"
                raise TopicsError(Code.QUERY_FAILED, str(died), {"reason": reason}) from None
            if isinstance(answer, QueryRows) and answer.processed_seq >= after:
                self.queries_total += 1
                return ViewRows(
                    answer.columns,
                    answer.rows,
                    answer.row_count,
                    answer.processed_seq,
                    answer.is_cut,
                )
            if isinstance(answer, SqlRefused):
                raise _refusal(answer)
            # The file was replaced, or is being made now: repeat the query on the current file.
            await asyncio.sleep(0.05)
        message = "the view cannot be read now"
        if isinstance(answer, Unreadable | DiskTrouble):
            log.warning("view %s of %s: %s", view.name, view.topic_name, answer.message)
        raise TopicsError(Code.NOT_READY, message, {"view": view.name})

    def named_query(self, topic: str, name: str, query: str) -> str:
        """The SQL of a named query. Raises `invalid_request` for an unknown name."""
        definition = self.view(topic, name).definition
        sql = definition.queries.get(query)
        if sql is None:
            known = ", ".join(sorted(definition.queries)) or "none"
            raise invalid(f'the view has no query "{query}"; it has: {known}', "query")
        return sql

    def listen(self, topic: str, name: str, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever the view has moved; the returned function removes it."""
        view = self.view(topic, name)
        view.listen(listener)
        return lambda: view.unlisten(listener)

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._is_closed


def _refusal(answer: SqlRefused) -> TopicsError:
    return TopicsError(
        Code.QUERY_FAILED,
        answer.message[:1000],
        {"reason": answer.reason, "statement": answer.statement[:256]},
    )
