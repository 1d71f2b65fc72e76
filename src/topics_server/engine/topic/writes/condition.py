"""Conditions that a topic must meet when a write is decided. Pure.

A condition applies to visible records. A staged record may still fail, so a conflict with a staged
record is undecided until its entry is applied. A condition is also undecided while there are more
records to search. Records only die and never change, so no record is searched twice (`_clear_seq`);
sealed records are searched off the loop (`engine/conditions`). Replay never evaluates a condition.
Called by the `decide` functions of appends and by the calls of `engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from topics_server.engine.filters import AnyOf, Filter, Matcher, TagLeaf
from topics_server.engine.log.log import Log
from topics_server.engine.log.runs import OpenBlock, Rows, Run, SealedRun, TailBlock
from topics_server.engine.topic import retention
from topics_server.engine.topic.topic import Topic
from topics_server.values.appends import DecodedAppend
from topics_server.values.entries import RecordsAppended
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import TagMatch

# One decision examines at most this many records, and its filter makes at most this many look-ups,
# before it yields to the loop.
_ROWS_MAX: Final = 2048
_LOOKUPS_MAX: Final = 8192
# From this many rows on, the tag index of a block is used instead of examining every row; using it
# counts as this many rows.
_INDEXED_ROWS_MIN: Final = 256


class Condition(msgspec.Struct, frozen=True, gc=False):
    """The requirements of a write on its topic; None: no requirement.

    `none_match`: no live record after `after` may pass this filter. `code`: the error if the
    condition is not met.
    """

    exists: bool | None = None
    epoch: int | None = None
    head_seq: int | None = None
    none_match: Filter | None = None
    after: int = 0
    code: Code = Code.CONDITION_FAILED


class ConditionCounts:
    """How many conditions were met and how many were not, since the process started."""

    __slots__ = ("failed", "met")

    def __init__(self) -> None:
        self.met = 0
        self.failed = 0


class UndecidedError(Exception):
    """The condition cannot be decided now: decide again.

    `lsn`: wait until this entry of the topic is applied or has failed; None: search further.
    """

    def __init__(self, topic: Topic, lsn: int | None) -> None:
        super().__init__(lsn)
        self.topic = topic
        self.lsn = lsn


class ConditionCheck:
    """The check of one write's condition, from its first to its last decision.

    `found`: rows that pass the filter, by searched segment.
    """

    def __init__(self, condition: Condition, counts: ConditionCounts) -> None:
        self.condition = condition
        self._counts = counts
        self.found: dict[int, Rows] = {}
        self._topic: Topic | None = None

    # -- deciding --------------------------------------------------------------------------

    def decide_absent(self, name: str) -> None:
        """Raise the condition's error unless a topic that does not exist meets it."""
        condition = self.condition
        detail: dict[str, object] = {"topic": name, "reason": "absent"}
        if condition.exists or condition.epoch is not None:
            raise self._failed(f'topic "{name}" does not exist', detail)
        if condition.head_seq or condition.after:
            raise self._failed(f'topic "{name}" does not exist, so it has no records', detail)
        self._counts.met += 1

    def decide(self, topic: Topic, now_ms: int) -> None:
        """Raise the condition's error if it is not met, or `UndecidedError`."""
        condition, log = self.condition, topic.log
        if condition.exists is False:
            raise self._failed(f'topic "{topic.name}" exists', _detail(topic, "exists"))
        if condition.epoch is not None and condition.epoch != topic.epoch:
            message = f"the topic's epoch is {topic.epoch}, not {condition.epoch}"
            raise self._failed(message, _detail(topic, "epoch"))
        if condition.head_seq is not None:
            self._decide_head(topic, log, condition.head_seq)
        wanted = condition.none_match
        if wanted is not None and not _is_clear(topic, log, wanted, condition.after):
            self._decide_none(topic, wanted, now_ms)
        self._counts.met += 1

    def _decide_head(self, topic: Topic, log: Log, wanted: int) -> None:
        head_seq = log.head_seq
        if head_seq <= wanted:
            for staged in topic.staging.assigning():
                raise UndecidedError(topic, staged.lsn)
        if head_seq != wanted:
            message = f"the topic's head is {head_seq}, not {wanted}"
            detail = _detail(topic, "head", wanted + 1) if head_seq > wanted else None
            raise self._failed(message, detail or _detail(topic, "ahead"))

    def _decide_none(self, topic: Topic, wanted: Filter, now_ms: int) -> None:
        after = self.condition.after
        if self._topic is not topic:
            self._begin(topic, wanted)
        if after > topic.staged_seq:
            message = f"the topic's head is {topic.log.head_seq}, below {after}"
            raise self._failed(message, _detail(topic, "ahead"))
        if _is_trimmed(topic, after, now_ms):
            message = f"records after {after} were lost or have expired: nothing tells their tags"
            raise self._failed(message, _detail(topic, "trimmed"))
        rows_left = self._search_log(topic, wanted, _ROWS_MAX)
        self._search_staged(topic, wanted, rows_left)

    def _begin(self, topic: Topic, wanted: Filter) -> None:
        """Begin the search: the first decision that must search this topic."""
        self._topic = topic
        # The segments of a recreated topic may have the same ids as those of the old one.
        self.found = {}
        # Made when the first single record must be examined.
        self._matcher: Matcher | None = None
        self._tags = _any_of_tags(wanted)
        # The exact tags, if none of them is a prefix.
        self._exact = None if self._tags is None else _exact(self._tags)
        # No live record in `after + 1 .. _clear_seq` passes, nor one staged up to `_clear_lsn`.
        self._clear_seq = self.condition.after
        self._clear_lsn = 0
        # Nor do the first records of the next staged entry pass, up to this number.
        self._clear_count = 0

    def _search_log(self, topic: Topic, wanted: Filter, rows_left: int) -> int:
        """Search the visible records; returns how many more may be examined now."""
        log = topic.log
        runs = log.runs
        for index in range(log.run_at(self._clear_seq + 1), len(runs)):
            run = runs[index]
            row, end_row, cost = -1, run.count, 0
            if run.live_count:
                first_row = max(0, self._clear_seq + 1 - run.first_seq)
                if isinstance(run, SealedRun):
                    rows = self.found.get(run.segment_id)
                    if rows is None:
                        raise UndecidedError(topic, None)
                    live = run.live_rows_of(rows[np.searchsorted(rows, first_row) :])
                    row = int(live[0]) if len(live) else -1
                else:
                    row, end_row, cost = self._search_run(run, wanted, first_row, rows_left)
            if row >= 0:
                seq = run.first_seq + row
                raise self._failed(f"record {seq} matches", _detail(topic, "match", seq))
            rows_left -= cost
            self._clear_seq = run.first_seq + end_row - 1
            if end_row < run.count:
                raise UndecidedError(topic, None)
        self._clear_seq = max(self._clear_seq, log.head_seq)
        return rows_left

    def _search_run(
        self, run: Run, wanted: Filter, first_row: int, rows_left: int
    ) -> tuple[int, int, int]:
        """The first live row that passes, or -1; the end of the examined rows; their cost."""
        dead = run.dead
        if isinstance(run, TailBlock):
            if self._tags is not None and run.count - first_row >= _INDEXED_ROWS_MIN:
                if rows_left <= 0:
                    return -1, first_row, 0
                hits = (row for match in self._tags for row in run.rows_of(match))
                first = min((row for row in hits if row >= first_row and not dead[row]), default=-1)
                return first, run.count, _INDEXED_ROWS_MIN
            tags, nodes = run.block.tags, run.block.nodes
        else:
            assert isinstance(run, OpenBlock)
            tags, nodes = run.tags, run.nodes
        end_row = min(run.count, first_row + max(0, rows_left))
        if self._exact is not None and self._exact.isdisjoint(tags[first_row:end_row]):
            return -1, end_row, end_row - first_row
        matcher = self._matcher_of(wanted)
        spent_max = matcher.spent + _LOOKUPS_MAX
        for row in range(first_row, end_row):
            if not dead[row] and matcher(tags[row], nodes[row]):
                return row, end_row, 0
            if matcher.spent >= spent_max:
                return -1, row + 1, rows_left
        return -1, end_row, end_row - first_row

    def _search_staged(self, topic: Topic, wanted: Filter, rows_left: int) -> None:
        after = self.condition.after
        for staged in topic.staging.assigning():
            if staged.lsn <= self._clear_lsn or staged.last_seq <= after:
                continue
            entry = staged.entry
            if not isinstance(entry, RecordsAppended) or entry.slot_count:
                # The slots of the run will become a hole.
                raise UndecidedError(topic, staged.lsn)
            assert entry.decoded is not None, "a live append is decoded"
            first = max(self._clear_count, after + 1 - staged.first_seq)
            tags = entry.decoded.tags
            if self._exact is None:
                self._search_columns(topic, wanted, staged.lsn, entry.decoded, first)
            elif not self._exact.isdisjoint(tags[first:]):
                raise UndecidedError(topic, staged.lsn)
            self._clear_lsn, self._clear_count = staged.lsn, 0
            rows_left -= staged.count
            if rows_left <= 0:
                raise UndecidedError(topic, None)

    def _search_columns(
        self, topic: Topic, wanted: Filter, lsn: int, decoded: DecodedAppend, first: int
    ) -> None:
        """Examine the records of a staged entry from `first` on, one by one."""
        matcher, tags, nodes = self._matcher_of(wanted), decoded.tags, decoded.nodes
        spent_max = matcher.spent + _LOOKUPS_MAX
        for index in range(first, decoded.count):
            if matcher(tags[index], nodes[index]):
                raise UndecidedError(topic, lsn)
            if matcher.spent >= spent_max:
                self._clear_count = index + 1
                raise UndecidedError(topic, None)

    def _matcher_of(self, wanted: Filter) -> Matcher:
        if self._matcher is None:
            self._matcher = Matcher(wanted)
        return self._matcher

    def _failed(self, message: str, detail: dict[str, object]) -> TopicsError:
        self._counts.failed += 1
        return TopicsError(self.condition.code, message, detail)

    # -- searching -------------------------------------------------------------------------

    def segments_to_search(self, topic: Topic, most: int) -> list[int]:
        """Segments that the next decision needs and that are not searched yet, the oldest first."""
        wanted: list[int] = []
        if topic is not self._topic:
            return wanted
        for run in topic.log.sealed():
            if run.live_count and run.last_seq > self._clear_seq:
                if run.segment_id not in self.found:
                    wanted.append(run.segment_id)
                if len(wanted) == most:
                    break
        return wanted


def _is_clear(topic: Topic, log: Log, wanted: Filter, after: int) -> bool:
    """Whether the newest block alone shows that no record after `after` has the tag.

    This decides nearly every condition. After False the general search must decide.
    """
    if not isinstance(wanted, TagLeaf) or len(wanted.matches) != 1 or not log.runs:
        return False
    match, run = wanted.matches[0], log.runs[-1]
    first_row = after + 1 - run.first_seq
    if (
        topic.staging.last_seq
        or log.holes
        or topic.config.ttl_ms
        or after + 1 < log.evict_floor
        or run.first_seq + len(run.dead) <= log.head_seq
        or not 0 <= first_row <= len(run.dead) < first_row + _INDEXED_ROWS_MIN
    ):
        return False
    if isinstance(run, OpenBlock):
        tags: Sequence[str | None] = run.tags[first_row:]
    elif isinstance(run, TailBlock):
        tags = run.block.tags[first_row:]
    else:
        return False
    if match.is_prefix:
        text = match.text
        return not any(tag is not None and tag.startswith(text) for tag in tags)
    return match.text not in tags


def _any_of_tags(wanted: Filter) -> tuple[TagMatch, ...] | None:
    """The tags of a filter that passes records with any of them; None for any other filter."""
    match wanted:
        case TagLeaf(matches):
            return matches
        case AnyOf(parts):
            found = [_any_of_tags(part) for part in parts]
            if None not in found:
                return tuple(match for part in found if part is not None for match in part)
        case _:
            pass
    return None


def _exact(tags: tuple[TagMatch, ...]) -> frozenset[str | None] | None:
    """The texts of the tags; None if one of them is a prefix."""
    if len(tags) == 1:
        (only,) = tags
        return None if only.is_prefix else frozenset((only.text,))
    if any(match.is_prefix for match in tags):
        return None
    return frozenset(match.text for match in tags)


def _is_trimmed(topic: Topic, after: int, now_ms: int) -> bool:
    """Whether a record after `after` was lost or has expired."""
    log = topic.log
    if after >= log.head_seq:
        return False
    if after + 1 < log.evict_floor:
        return True
    if log.holes and any(hole.last_seq > after for hole in log.holes):
        return True
    if not topic.config.ttl_ms:
        return False
    earliest_seq = retention.first_unexpired(log, topic.config.ttl_ms, now_ms)
    return earliest_seq > log.earliest_seq and log.next_live(after + 1) < earliest_seq


def _detail(topic: Topic, reason: str, seq: int | None = None) -> dict[str, object]:
    first = {} if seq is None else {"seq": seq}
    head = {"head_seq": topic.log.head_seq, "epoch": topic.epoch}
    return {"topic": topic.name, "reason": reason, **first, **head}
