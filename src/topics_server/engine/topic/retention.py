"""Computes how far caps and TTL move the floor.

The floor is the first seq not lost involuntarily. TTL: records older than `ttl_ms` are expired, so
the floor is after the last live one of them; records that were deleted before they expired do not
move it. Caps: after an append at most `cap_records` live records and `cap_bytes` bytes remain; the
newest record always stays, even if it alone is larger than `cap_bytes`. Records that a consumer
with a hold has not finished stay as well, as long as the topic is within the bounds of the hold.
Deletes in flight do not count as free space, because they may fail. A record that was once found
expired stays expired when the clock is set back: `Log.expired_seq` stores this. The clock is not
checked: if it is too fast for a moment, records that look too old at that moment expire, and no
later ones. Called by `writes/`, `topic`, `engine/consumers` and `engine/read/page`.
"""

from __future__ import annotations

from collections.abc import Sequence

from topics_server.engine.log.log import Log
from topics_server.engine.topic.staging import Staging
from topics_server.values.appends import DecodedAppend
from topics_server.values.blocks import record_bytes
from topics_server.values.entries import Floor, RecordsAppended
from topics_server.values.errors import Code, Corrupt, TopicsError
from topics_server.values.model import ConsumerHold, Discard, LossReason, TopicConfig

# The seq and the hold of consumers for which caps keep records.
Holds = Sequence[tuple[int, ConsumerHold]]


def first_unexpired(log: Log, ttl_ms: int, now_ms: int) -> int:
    """The first live seq that is not expired; `head_seq + 1` if there is none."""
    if ttl_ms == 0 or not _expires(log, now_ms - ttl_ms):
        return log.earliest_seq
    return log.next_live(log.expired_seq)


def expired_floor(log: Log, ttl_ms: int, now_ms: int) -> int:
    """The floor by TTL now: after the last live record that is too old."""
    if ttl_ms == 0 or not _expires(log, now_ms - ttl_ms):
        return log.evict_floor
    last = log.last_live_below(log.expired_seq)
    assert last >= log.earliest_seq
    return last + 1


def _expires(log: Log, since_ms: int) -> bool:
    """Whether a live record is expired: older than `since_ms`, or found expired before.

    While the index of a segment is damaged, its times are not known, and none of its records
    expires: it is mended within moments.
    """
    earliest = log.earliest_seq
    if log.live_count == 0:
        return False
    try:
        is_old = log.time_of(earliest) < since_ms
        expired_seq = log.first_seq_since(since_ms) if is_old else 0
    except Corrupt:
        expired_seq = 0
    log.expired_seq = max(log.expired_seq, expired_seq)
    return log.expired_seq > earliest


def standing_floor(
    log: Log, staging: Staging, config: TopicConfig, now_ms: int, holds: Holds = ()
) -> Floor | None:
    """The floor that is due without an append: by TTL, or by caps that were tightened."""
    start = max(log.evict_floor, staging.floor_seq)
    expired = max(start, expired_floor(log, config.ttl_ms, now_ms))
    floor = expired
    if config.discard is Discard.OLD and (config.cap_records or config.cap_bytes):
        have = _projected(log, staging, expired)
        floor = _cap_point(log, staging, config, expired, have, holds, None)
    return _floor(start, expired, floor)


def held_by(log: Log, staging: Staging, config: TopicConfig, now_ms: int, seq: int) -> int:
    """The number of records that caps keep only for a consumer that has finished up to `seq`."""
    if config.discard is not Discard.OLD or not (config.cap_records or config.cap_bytes):
        return 0
    expired = max(log.evict_floor, expired_floor(log, config.ttl_ms, now_ms))
    have = _projected(log, staging, expired)
    first = max(seq + 1, expired)
    point = _cap_point(log, staging, config, expired, have, (), None)
    return log.live_between(first, point - 1)[0] if first < point else 0


def append_floor(
    log: Log,
    staging: Staging,
    config: TopicConfig,
    decoded: DecodedAppend,
    now_ms: int,
    name: str,
    holds: Holds = (),
    slots: int = 0,
) -> Floor | None:
    """The floor after appending these records, so that the caps hold exactly.

    `slots`: the number of seqs without a record before them. Raises `topic_full` if the topic
    refuses appends when it is full.
    """
    start = max(log.evict_floor, staging.floor_seq)
    expired = max(start, expired_floor(log, config.ttl_ms, now_ms))
    have_count, have_bytes = _projected(log, staging, expired)
    have = (have_count + decoded.count, have_bytes + decoded.weight)
    floor = expired
    if max(_over(config.cap_records, config.cap_bytes, *have)) > 0:
        if config.discard is Discard.REJECT:
            raise _full(name, config, have_count, have_bytes)
        floor = _cap_point(log, staging, config, expired, have, holds, decoded, slots)
    return _floor(start, expired, floor)


def _cap_point(
    log: Log,
    staging: Staging,
    config: TopicConfig,
    seq: int,
    have: tuple[int, int],
    holds: Holds,
    decoded: DecodedAppend | None,
    slots: int = 0,
) -> int:
    """The seq after the records that caps evict from `seq` on, given the counts there."""
    over = _over(config.cap_records, config.cap_bytes, *have)
    if max(over) <= 0:
        return seq
    kept: int | None = None
    for done_seq, hold in holds:
        # Begin after the last record that the consumer has finished: records deleted after it are
        # not lost.
        first = max(seq, log.last_live_below(done_seq + 1) + 1)
        beyond = _over(hold.max_records, hold.max_bytes, *have)
        if max(beyond) > 0:
            first = max(first, _evict_point(log, staging, seq, beyond, decoded, slots))
        kept = first if kept is None else min(kept, first)
    if kept == seq:
        return seq
    point = _evict_point(log, staging, seq, over, decoded, slots)
    return point if kept is None else min(point, kept)


def _floor(start: int, expired: int, floor: int) -> Floor | None:
    assert start <= expired <= floor
    if floor == start:
        return None
    if floor == expired:
        return Floor(floor, LossReason.TTL)
    return Floor(floor, LossReason.CAP if expired == start else LossReason.MIXED)


def _over(max_records: int, max_bytes: int, count: int, weight: int) -> tuple[int, int]:
    """By how many records and bytes caps are exceeded; 0 or less if they are not, or are off."""
    return (
        count - max_records if max_records else 0,
        weight - max_bytes if max_bytes else 0,
    )


def _full(name: str, config: TopicConfig, count: int, weight: int) -> TopicsError:
    detail: dict[str, int | str] = {"topic": name, "count": count, "bytes": weight}
    if config.cap_records:
        detail["cap_records"] = config.cap_records
    if config.cap_bytes:
        detail["cap_bytes"] = config.cap_bytes
    return TopicsError(Code.TOPIC_FULL, "the topic is full and refuses new records", detail)


def _projected(log: Log, staging: Staging, floor_seq: int) -> tuple[int, int]:
    """The records and bytes from `floor_seq` on, once all entries in flight are applied."""
    gone_count, gone_bytes = 0, 0
    if floor_seq > log.earliest_seq:
        gone_count, gone_bytes = log.live_between(log.earliest_seq, floor_seq - 1)
    count, weight = log.live_count - gone_count, log.live_bytes - gone_bytes
    if staging.first_seq >= floor_seq or not staging.records:
        return count + staging.records, weight + staging.weight
    for staged in staging.appends():
        if staged.first_seq >= floor_seq:
            count += staged.count
            weight += staged.weight
        elif staged.first_seq + staged.count > floor_seq:
            assert isinstance(staged.entry, RecordsAppended)
            sizes = _sizes(staged.entry.decoded)[floor_seq - staged.first_seq :]
            count += len(sizes)
            weight += sum(sizes)
    return count, weight


def _sizes(decoded: DecodedAppend | None) -> list[int]:
    assert decoded is not None, "a live append is decoded"
    columns = (decoded.datas, decoded.metas, decoded.tags, decoded.nodes)
    return [record_bytes(*record) for record in zip(*columns, strict=True)]


def _evict_point(
    log: Log,
    staging: Staging,
    seq: int,
    over: tuple[int, int],
    decoded: DecodedAppend | None,
    slots: int = 0,
) -> int:
    """The seq after the records to evict from `seq` on; the newest record is kept."""
    over_count, over_bytes = over
    point, count, weight = log.advance_live(seq, over_count, over_bytes)
    first_seq = max(log.head_seq, staging.last_seq) + 1 + slots
    if decoded is not None:
        newest = first_seq + decoded.count - 1
    else:
        newest = first_seq - 1 if staging.records else log.last_live_below(log.head_seq + 1)
    if count < over_count or weight < over_bytes:
        pending = [
            (staged.first_seq, staged.entry.decoded)
            for staged in staging.appends()
            if isinstance(staged.entry, RecordsAppended)
        ]
        if decoded is not None:
            pending.append((first_seq, decoded))
        for first, columns in pending:
            for offset, size in enumerate(_sizes(columns)):
                if first + offset < seq:
                    continue
                if (count >= over_count and weight >= over_bytes) or first + offset == newest:
                    break
                point = first + offset + 1
                count += 1
                weight += size
    if point > newest:
        # Return the seq after the last live record before the newest one: records deleted between
        # them are not lost.
        point = log.last_live_below(newest) + 1
    return max(seq, point)
