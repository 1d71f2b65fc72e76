"""Reads payloads of sealed records off the loop and caches their blocks.

Turns a page plan into a page. Contains no rule of reading. A segment that was dropped between plan
and read is not an error: the plan is made again. Called by the modules of `engine` that read or
search sealed records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Final, cast

from topics_server.engine.answers import JsonPage, JsonPiece, Page, Piece
from topics_server.engine.log.block_slices import slice_block
from topics_server.engine.log.runs import SealedRun
from topics_server.engine.ports import SegmentsPort
from topics_server.engine.read.block_cache import BlockCache, BlockPart
from topics_server.engine.read.filtered import READ_TOGETHER, Search, search_segment
from topics_server.engine.read.object_cache import ObjectCache, ObjectKey
from topics_server.engine.read.page import (
    FEW_ROWS,
    Fetch,
    PagePlan,
    SealedPiece,
    SealedSpan,
    complete,
    page_of,
)
from topics_server.engine.read.page_parts import Parts, page_of_parts
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.runtime.metrics import log
from topics_server.values.blocks import Block
from topics_server.values.columns.json_rows import DATA, META, TAGS, JsonBlock
from topics_server.values.errors import Damaged, StorageError
from topics_server.values.limits import (
    BLOCK_CACHE_BYTES_MAX,
    BLOCK_RECORDS_MAX,
    MIB,
    OBJECT_CACHE_BYTES_MAX,
    PAGE_BYTES_MAX,
)
from topics_server.values.model import TagMatch
from topics_server.values.storage_types import Offload

# The maximum of rows that one read unpacks.
_ROWS_TOGETHER: Final = 8 * BLOCK_RECORDS_MAX
# The maximum that a page reads on the loop's thread, if the system has it in memory: under 2 ms.
_GROUPS_NOW: Final = 8
_BYTES_NOW: Final = MIB
# The same for JSON objects, which are neither unpacked nor rendered. Pages of larger groups are
# made of blocks, whose cache holds more of them.
_OBJECT_BYTES_MAX: Final = 4 * MIB


def _kind_of(fetch: Fetch) -> tuple[int, bool]:
    """The key of a fetch: its segment, and whether it is read group by group."""
    return fetch.segment_id, fetch.is_group


def _may_be_json(shown: int) -> bool:
    """Whether a page with these members may be JSON objects: few with tags and without `meta`."""
    return bool(shown & DATA) and shown & (TAGS | META) != TAGS


def _is_part(plan: PagePlan) -> bool:
    """Whether a page has less than half of the sealed rows that are read for it."""
    sealed = [piece for piece in plan.pieces if isinstance(piece, SealedPiece)]
    wanted = sum(len(piece.rows) for piece in sealed)
    return 2 * wanted < sum(piece.fetch.end_row - piece.fetch.first_row for piece in sealed)


def _adjacent(fetches: Sequence[Fetch]) -> Iterable[list[Fetch]]:
    """Fetches whose rows follow each other, together: one read unpacks their rows at once."""
    together: list[Fetch] = []
    for fetch in fetches:
        if together and (
            fetch.first_row != together[-1].end_row
            or fetch.end_row - together[0].first_row > _ROWS_TOGETHER
        ):
            yield together
            together = []
        together.append(fetch)
    if together:
        yield together


def _parts(block: Block, fetches: Sequence[Fetch]) -> dict[Fetch, Block]:
    """The block of each fetch, cut from a block of all their rows."""
    if len(fetches) == 1:
        return {fetches[0]: block}
    first = fetches[0].first_row
    return {
        fetch: slice_block(block, fetch.first_row - first, fetch.end_row - first)
        for fetch in fetches
    }


class Fetcher:
    """Reads sealed segments for the store."""

    def __init__(self, registry: Registry, segments: SegmentsPort, offload: Offload) -> None:
        self._registry = registry
        self._segments = segments
        self._offload = offload
        self._cache = BlockCache(BLOCK_CACHE_BYTES_MAX)
        self._objects = ObjectCache(OBJECT_CACHE_BYTES_MAX)
        # Called when damage was found in a topic: the topic's next capture must include the damage.
        self.on_moved: list[Callable[[int], None]] = []
        # Called with topic and segment when damage was found or a file could not be read.
        self.on_damaged: list[Callable[[int, int], None]] = []
        # The number of mended segments: blocks that were read before a mend may have blank rows.
        self._mended = 0

    def resident(
        self, topic: Topic, plan: PagePlan, held: Mapping[Fetch, Block] | None = None
    ) -> Page | None:
        """The page of a plan if all its blocks are in memory: in the cache or from the caller."""
        fetched: dict[Fetch, Block] = {}
        for piece in plan.pieces:
            if isinstance(piece, SealedPiece):
                fetch = piece.fetch
                block = None if held is None else held.get(fetch)
                if block is None:
                    block = self._cached(topic.topic_id, fetch)
                if block is None:
                    return None
                fetched[fetch] = block
        return complete(plan, fetched)

    def read_now(self, topic: Topic, plan: PagePlan, shown: int = 0) -> Page | JsonPage | None:
        """The page of a plan if its blocks are in memory: here, or in the system's page cache.

        Groups that follow each other are one block of the page, and are kept as parts of it.
        `shown`: if the caller renders `DATA`, the members that it renders. Then rows may be JSON
        objects. These are preferred to kept blocks, whose records would have to be rendered.
        """
        if plan.span is not None:
            page = self._span_now(topic.topic_id, plan, plan.span, shown)
            if page is not None:
                return page
            plan = plan.grouped()
        if not (plan.pieces and isinstance(plan.pieces[0], SealedPiece)):
            # Sealed records come before all others.
            return page_of(plan, cast("list[Piece]", plan.pieces))
        topic_id, may_be_json = topic.topic_id, _may_be_json(shown)
        pieces: list[Piece] = []
        fetched: dict[Fetch, Block] = {}
        missing: list[Fetch] = []
        for piece in plan.pieces:
            if isinstance(piece, SealedPiece):
                fetch = piece.fetch
                may_be_kept = not (may_be_json and fetch.is_group)
                block = self._cached(topic_id, fetch) if may_be_kept else None
                if block is not None:
                    fetched[fetch] = block
                    piece = Piece(block, piece.rows)
                elif fetch.is_group:
                    missing.append(fetch)
                    continue
                else:
                    return None
            pieces.append(piece)
        if not missing:
            return page_of(plan, pieces)
        parts = self._parts_now(topic_id, missing, fetched, shown, is_part=_is_part(plan))
        return None if parts is None else page_of_parts(plan, fetched, parts)

    async def read_json_from_disk(
        self, topic: Topic, plan: PagePlan, shown: int
    ) -> Page | JsonPage | None:
        """The page of a plan with JSON objects, which a worker thread reads.

        For a page that `read_now` does not find in memory; `shown` as there. None if rows of the
        page cannot be JSON objects or cannot be read: `complete` reads them and reports damage.
        """
        wanted = plan.fetches()
        if not (wanted and _may_be_json(shown) and all(fetch.is_group for fetch in wanted)):
            return None
        mended, is_part = self._mended, _is_part(plan)
        read: dict[ObjectKey, JsonBlock] = {}
        parts = await self._offload.run(
            partial(self._read_objects, topic.topic_id, wanted, shown, read)
        )
        if parts is None or mended != self._mended:
            return None
        for key, objects in read.items():
            self._objects.note(key, objects, is_part=is_part)
        return page_of_parts(plan, {}, parts)

    def _read_objects(
        self,
        topic_id: int,
        groups: Sequence[Fetch],
        shown: int,
        read: dict[ObjectKey, JsonBlock],
    ) -> Parts | None:
        """*Blocking.* The groups of a page as JSON objects, which are added to `read` by their key.

        Returns None if a group has none.
        """
        bytes_left = _OBJECT_BYTES_MAX
        parts: Parts = {}
        for _, same in groupby(groups, _kind_of):
            for together in _adjacent(list(same)):
                segment_id, first_row = together[0].segment_id, together[0].first_row
                end_row = together[-1].end_row
                at = topic_id, segment_id, range(first_row, end_row)
                try:
                    objects = self._segments.read_json(*at, bytes_left, shown)
                except StorageError:
                    return None
                if objects is None:
                    return None
                read[topic_id, segment_id, first_row, end_row, shown] = objects
                bytes_left -= len(objects.body)
                parts |= {fetch: (objects, fetch.first_row - first_row) for fetch in together}
        return parts

    def _parts_now(
        self,
        topic_id: int,
        missing: Sequence[Fetch],
        fetched: dict[Fetch, Block],
        shown: int,
        *,
        is_part: bool,
    ) -> Parts | None:
        """Groups of a page that are not looked for in the cache yet; None if a read would wait.

        Adds those that are cached, or read alone, to `fetched`.
        """
        bytes_left, groups_left, object_bytes_left = _BYTES_NOW, _GROUPS_NOW, _OBJECT_BYTES_MAX
        parts: Parts = {}
        for _, same in groupby(missing, _kind_of):
            for together in _adjacent(list(same)):
                segment_id, first_row = together[0].segment_id, together[0].first_row
                at = topic_id, segment_id, range(first_row, together[-1].end_row)
                objects = None
                if shown & DATA:
                    objects = self._objects_now(*at, object_bytes_left, shown, is_part=is_part)
                    if objects is None:
                        together = self._uncached(topic_id, together, fetched)
                if objects is not None:
                    object_bytes_left -= len(objects.body)
                    parts |= {fetch: (objects, fetch.first_row - first_row) for fetch in together}
                    continue
                for run in _adjacent(together):
                    groups_left -= len(run)
                    if groups_left < 0:
                        return None
                    read = self._blocks_now(topic_id, run, bytes_left, fetched, parts)
                    if read is None:
                        return None
                    bytes_left -= read
        return parts

    def _span_now(
        self, topic_id: int, plan: PagePlan, span: SealedSpan, shown: int
    ) -> JsonPage | None:
        """A page of JSON objects that follow each other; None if it needs its groups."""
        rows, first, end = span.groups, span.first_row, span.end_row
        if not _may_be_json(shown) or len(rows) > _ROWS_TOGETHER:
            return None
        is_part = 2 * (end - first) < len(rows)
        at = topic_id, span.segment_id, rows
        objects = self._objects_now(*at, _OBJECT_BYTES_MAX, shown, is_part=is_part)
        if objects is None:
            return None
        inside = range(first - rows.start, end - rows.start)
        return JsonPage([JsonPiece(objects, inside)], page_of(plan, []))

    def _objects_now(
        self, topic_id: int, segment_id: int, rows: range, most: int, shown: int, *, is_part: bool
    ) -> JsonBlock | None:
        key = topic_id, segment_id, rows.start, rows.stop, shown
        objects = self._objects.get(key)
        if objects is None:
            objects = self._segments.read_json_now(topic_id, segment_id, rows, most, shown)
            if objects is not None:
                self._objects.note(key, objects, is_part=is_part)
        return objects

    def _uncached(
        self, topic_id: int, groups: Sequence[Fetch], fetched: dict[Fetch, Block]
    ) -> list[Fetch]:
        """The groups that are not cached; adds the other ones to `fetched`."""
        found: list[Fetch] = []
        for fetch in groups:
            block = self._cached(topic_id, fetch)
            if block is None:
                found.append(fetch)
            else:
                fetched[fetch] = block
        return found

    def _blocks_now(
        self,
        topic_id: int,
        groups: Sequence[Fetch],
        most: int,
        fetched: dict[Fetch, Block],
        parts: Parts,
    ) -> int | None:
        """Read groups that follow each other; returns their bytes, None if a read would wait."""
        segment_id, first_row = groups[0].segment_id, groups[0].first_row
        rows = range(first_row, groups[-1].end_row)
        block = self._segments.read_now(topic_id, segment_id, rows, most)
        if block is None:
            return None
        if len(groups) == 1:
            fetched[groups[0]] = block
            self._keep(topic_id, groups[0], block)
            return len(block.body)
        for fetch in groups:
            first, end = fetch.first_row - first_row, fetch.end_row - first_row
            self._cache.put((topic_id, segment_id, fetch.first_row), BlockPart(block, first, end))
            parts[fetch] = block, first
        return len(block.body)

    def _cached(self, topic_id: int, fetch: Fetch) -> Block | None:
        if not fetch.is_group:
            return self._cut(topic_id, fetch)
        block = self._cache.get((topic_id, fetch.segment_id, fetch.first_row))
        if block is None or block.count != fetch.end_row - fetch.first_row:
            return None
        return block

    def _cut(self, topic_id: int, fetch: Fetch) -> Block | None:
        """The rows of a small fetch, cut from a group in memory."""
        group = fetch.first_row - fetch.first_row % BLOCK_RECORDS_MAX
        block = self._cache.get((topic_id, fetch.segment_id, group))
        if block is None or block.count < fetch.end_row - group:
            return None
        return slice_block(block, fetch.first_row - group, fetch.end_row - group)

    async def complete(
        self, topic: Topic, plan: PagePlan, ahead: Mapping[tuple[int, int], Block] | None = None
    ) -> Page | None:
        """The page of a plan; `None` if the plan must be made again, or the topic is dropped.

        `ahead`: rows that were read before, see `Search`. Raises `StorageError` when a segment that
        is still listed cannot be read.
        """
        wanted = plan.fetches()
        if not wanted:
            return complete(plan, {})
        topic_id, mended = topic.topic_id, self._mended
        fetched: dict[Fetch, Block] = {}
        missing: list[Fetch] = []
        for fetch in wanted:
            block = self._cached(topic_id, fetch)
            if block is None and ahead and not fetch.is_group:
                block = ahead.get((fetch.segment_id, fetch.first_row))
            if block is not None:
                fetched[fetch] = block
            else:
                missing.append(fetch)
        for start in range(0, len(missing) if len(missing) > 1 else 0, READ_TOGETHER):
            together = missing[start : start + READ_TOGETHER]
            fetched |= await self._offload.run(partial(self._read_all, topic_id, together))
        for fetch in missing:
            block = fetched.get(fetch)
            if block is not None:
                self._keep(topic_id, fetch, block)
                continue
            block = await self._read(topic, fetch, plan)
            if block is None:
                return None
            fetched[fetch] = block
        return None if mended != self._mended else complete(plan, fetched)

    def forget(self, topic_id: int, segment_id: int) -> None:
        """Discard all blocks and objects of a mended segment that were read before."""
        self._mended += 1
        self._cache.forget(topic_id, segment_id)
        self._objects.forget(topic_id, segment_id)

    def _read_all(self, topic_id: int, wanted: Sequence[Fetch]) -> dict[Fetch, Block]:
        """*Blocking.* The blocks of a page, up to the first one whose read fails."""
        found: dict[Fetch, Block] = {}
        read, read_rows = self._segments.read, self._segments.read_rows
        for (segment_id, is_group), fetches in groupby(wanted, _kind_of):
            together = list(fetches)
            try:
                if is_group or len(together) == 1:
                    for range_ in _adjacent(together):
                        first_row, end_row = range_[0].first_row, range_[-1].end_row
                        block = read(topic_id, segment_id, first_row, end_row)
                        found |= _parts(block, range_)
                else:
                    rows = [fetch.first_row for fetch in together]
                    blocks = read_rows(topic_id, segment_id, rows, PAGE_BYTES_MAX)
                    found |= zip(together, blocks, strict=False)
            except StorageError:
                break
        return found

    def _keep(self, topic_id: int, fetch: Fetch, block: Block) -> None:
        if fetch.is_group:
            self._cache.put((topic_id, fetch.segment_id, fetch.first_row), block)

    async def _read(self, topic: Topic, fetch: Fetch, plan: PagePlan) -> Block | None:
        topic_id, mended = topic.topic_id, self._mended
        at = topic_id, fetch.segment_id, fetch.first_row
        unwanted: list[tuple[int, int]] = []
        while True:
            try:
                block = await self._offload.run(
                    partial(self._segments.read, *at, fetch.end_row, tuple(unwanted))
                )
            except Damaged as damage:
                if self._note_damage(topic, fetch.segment_id, damage):
                    return None
                if plan.wants(fetch, damage.ranges):
                    return None  # deleted or evicted since the plan
                # No reader gets these rows: they are evicted, deleted, or known to be damaged.
                unwanted += damage.ranges
            except StorageError:
                if self._has(topic, fetch.segment_id):
                    self.note_broken(topic_id, fetch.segment_id)
                    raise
                return None
            else:
                if mended != self._mended:
                    return None
                self._keep(topic_id, fetch, block)
                return block

    def _has(self, topic: Topic, segment_id: int) -> bool:
        """Whether neither the topic nor this segment of it was dropped."""
        is_there = self._registry.get(topic.topic_id) is topic
        return is_there and segment_id in topic.log.segment_ids()

    async def check(self, topic: Topic, segment_id: int, first_row: int, end_row: int) -> int:
        """Read rows for the scrub, as for a reader; returns how many lost records were found.

        Raises `StorageError` when a segment that is still listed cannot be read.
        """
        unwanted: list[tuple[int, int]] = []
        lost = topic.log.damaged_records
        at = topic.topic_id, segment_id, first_row
        while self._has(topic, segment_id):
            try:
                await self._offload.run(partial(self._segments.read, *at, end_row, tuple(unwanted)))
            except Damaged as damage:
                self._note_damage(topic, segment_id, damage)
                # This includes damage of deleted records, which no reader notices.
                self.note_broken(topic.topic_id, segment_id)
                unwanted += damage.ranges
            except StorageError:
                if self._has(topic, segment_id):
                    raise
            else:
                break
        return max(0, topic.log.damaged_records - lost)

    async def check_index(self, topic: Topic, segment_id: int) -> bool:
        """Check a segment's index and delete flags on disk; returns whether they are damaged."""
        try:
            await self._offload.run(partial(self._segments.check_index, topic.topic_id, segment_id))
        except StorageError as error:
            if not self._has(topic, segment_id):
                return False
            log.error("topic %s: index or flags of segment %d: %s", topic.name, segment_id, error)
            self.note_broken(topic.topic_id, segment_id)
            return True
        return False

    def note_broken(self, topic_id: int, segment_id: int) -> None:
        """Report a segment with damage, or with a file that could not be read."""
        for callback in self.on_damaged:
            callback(topic_id, segment_id)

    def _note_damage(self, topic: Topic, segment_id: int, damage: Damaged) -> bool:
        """Note damage; return whether it changes the page."""
        if segment_id not in topic.log.segment_ids():
            return True
        count = sum(topic.note_damage(segment_id, *rows) for rows in damage.ranges)
        if not count:
            return False
        if self._registry.get(topic.topic_id) is topic:
            self._registry.recount(topic)
        log.error(
            "topic %s: segment %d is damaged, %d records are lost (%s)",
            topic.name,
            segment_id,
            count,
            damage,
        )
        for callback in self.on_moved:
            callback(topic.topic_id)
        self.note_broken(topic.topic_id, segment_id)
        return True

    async def find_tags(
        self, topic_id: int, segment_ids: Sequence[int], match: TagMatch
    ) -> dict[int, Sequence[int]]:
        """Rows by segment whose tag matches; without dropped segments."""

        def search() -> dict[int, Sequence[int]]:
            found: dict[int, Sequence[int]] = {}
            for segment_id in segment_ids:
                try:
                    found[segment_id] = self._segments.find_tags(topic_id, segment_id, match)
                except StorageError as error:
                    failed[segment_id] = error.with_traceback(None)
            return found

        failed: dict[int, StorageError] = {}
        found = await self._offload.run(search)
        topic = self._registry.get(topic_id)
        for segment_id in failed:
            if topic is not None and segment_id in topic.log.segment_ids():
                self.note_broken(topic_id, segment_id)
                # A raised error refers to this frame, so the frame must not refer to the error.
                raise failed.pop(segment_id)
        return found

    async def search(self, topic: Topic, segment_ids: Sequence[int], search: Search) -> bool:
        """Search segments, except dropped ones, for the rows that pass a filter.

        Searches only until there are as many rows as `search` expects, and also reads these rows if
        they are few. Returns whether the topic still exists. Raises `StorageError` when a listed
        segment cannot be searched.
        """
        topic_id, log = topic.topic_id, topic.log
        asked = set(segment_ids)
        wanted: list[SealedRun] = []
        for run in log.sealed():
            if run.segment_id in asked:
                wanted.append(run)
                if len(wanted) == len(asked):
                    break
        if len(wanted) > 1 and wanted[0].segment_id != segment_ids[0]:
            wanted.sort(key=lambda run: segment_ids.index(run.segment_id))

        def search_all() -> None:
            for run in wanted:
                find = partial(self._segments.find_tags, topic_id, run.segment_id)
                try:
                    rows = search_segment(run.index, search.wanted, find)
                except StorageError as error:
                    failed[run.segment_id] = error.with_traceback(None)
                else:
                    if search.take(run, rows, read):
                        return

        failed: dict[int, StorageError] = {}
        read = partial(self._read_alone, topic_id)
        await self._offload.run(search_all)
        for segment_id in failed:
            if self._has(topic, segment_id):
                self.note_broken(topic_id, segment_id)
                raise failed.pop(segment_id)
        return self._registry.get(topic_id) is topic

    def _read_alone(
        self, topic_id: int, segment_id: int, rows: Sequence[int], max_bytes: int
    ) -> Iterable[tuple[int, Block]]:
        """*Blocking.* Read those of these rows that a page reads alone; skip unreadable ones.

        The page itself handles rows of groups in memory, and of groups that it reads as a whole.
        """
        groups = Counter(row // BLOCK_RECORDS_MAX for row in rows)
        alone = [
            row
            for row in rows
            if groups[row // BLOCK_RECORDS_MAX] <= FEW_ROWS
            and not self._cache.has((topic_id, segment_id, row - row % BLOCK_RECORDS_MAX))
        ]
        if not alone:
            return ()
        try:
            # There are fewer blocks than rows if the blocks have enough bytes.
            blocks = self._segments.read_rows(topic_id, segment_id, alone, max_bytes)
            return zip(alone, blocks, strict=False)
        except StorageError:
            return ()

    def disk_bytes(self, topic_id: int) -> int:
        """Bytes of the topic's sealed files, hot and cold."""
        return sum(self._segments.bytes_of(topic_id))
