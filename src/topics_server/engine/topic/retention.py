"""Computes how far caps and TTL move the floor.

The floor is the first seq not lost involuntarily. TTL: records older than `ttl_ms` are gone, so the
floor is behind the last live one of them; records deleted before they expired do not move it. Caps:
after an append at most `cap_records` live records and `cap_bytes` bytes remain; the newest record
always stays, even when it alone is larger than `cap_bytes`. Deletes in flight do not count as free
space: they may fail. A record that was once found expired stays expired when the clock is set back:
`Log.expired_seq` remembers it. The clock is not checked: a clock that ran ahead for a moment
expires the records of that moment and no later ones. Called by `writes/`, `topic` and
`engine/read/page`.
"""

from __future__ import annotations

from topics_server.engine.log.log import Log
from topics_server.engine.topic.staging import Staging
from topics_server.values.appends import DecodedAppend
from topics_server.values.blocks import record_bytes
from topics_server.values.entries import Floor, RecordsAppended
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Discard, LossReason, TopicConfig


def first_unexpired(log: Log, ttl_ms: int, now_ms: int) -> int:
    """The first live seq that is not expired; `head_seq + 1` if there is none."""
    if ttl_ms == 0 or not _expires(log, now_ms - ttl_ms):
        return log.earliest_seq
    return log.next_live(log.expired_seq)


def expired_floor(log: Log, ttl_ms: int, now_ms: int) -> int:
    """The floor as expiry has it now: behind the last live record that is too old."""
    if ttl_ms == 0 or not _expires(log, now_ms - ttl_ms):
        return log.evict_floor
    last = log.last_live_below(log.expired_seq)
    assert last >= log.earliest_seq
    return last + 1


def _expires(log: Log, since_ms: int) -> bool:
    """Whether a live record is expired: older than `since_ms`, or found so before."""
    earliest = log.earliest_seq
    if log.live_count == 0:
        return False
    if log.time_of(earliest) < since_ms:
        log.expired_seq = max(log.expired_seq, log.first_seq_since(since_ms))
    return log.expired_seq > earliest


def standing_floor(log: Log, staging: Staging, config: TopicConfig, now_ms: int) -> Floor | None:
    """The floor that is due without an append: TTL, and caps that were tightened."""
    start = max(log.evict_floor, staging.floor_seq)
    expired = max(start, expired_floor(log, config.ttl_ms, now_ms))
    floor = expired
    if config.discard is Discard.OLD and (config.cap_records or config.cap_bytes):
        have = _projected(log, staging, expired)
        over = _over(config, *have)
        if max(over) > 0:
            floor = max(floor, _evict_point(log, staging, expired, over, None))
    return _floor(start, expired, floor)


def append_floor(
    log: Log,
    staging: Staging,
    config: TopicConfig,
    decoded: DecodedAppend,
    now_ms: int,
    name: str,
    slots: int = 0,
) -> Floor | None:
    """The records that appending these loses, themselves included, so that the caps hold exactly.

    `slots`: the number of seqs without a record before them. Raises `topic_full` when the topic
    refuses instead.
    """
    start = max(log.evict_floor, staging.floor_seq)
    expired = max(start, expired_floor(log, config.ttl_ms, now_ms))
    have_count, have_bytes = _projected(log, staging, expired)
    over = _over(config, have_count + decoded.count, have_bytes + decoded.weight)
    floor = expired
    if max(over) > 0:
        if config.discard is Discard.REJECT:
            raise _full(name, config, have_count, have_bytes)
        floor = _evict_point(log, staging, expired, over, decoded, slots)
    return _floor(start, expired, floor)


def _floor(start: int, expired: int, floor: int) -> Floor | None:
    assert start <= expired <= floor
    if floor == start:
        return None
    if floor == expired:
        return Floor(floor, LossReason.TTL)
    return Floor(floor, LossReason.CAP if expired == start else LossReason.MIXED)


def _over(config: TopicConfig, count: int, weight: int) -> tuple[int, int]:
    """By how many records and bytes the caps are exceeded; at most 0 if they are not."""
    return (
        count - config.cap_records if config.cap_records else 0,
        weight - config.cap_bytes if config.cap_bytes else 0,
    )


def _full(name: str, config: TopicConfig, count: int, weight: int) -> TopicsError:
    detail: dict[str, int | str] = {"topic": name, "count": count, "bytes": weight}
    if config.cap_records:
        detail["cap_records"] = config.cap_records
    if config.cap_bytes:
        detail["cap_bytes"] = config.cap_bytes
    return TopicsError(Code.TOPIC_FULL, "the topic is full and refuses new records", detail)


def _projected(log: Log, staging: Staging, floor_seq: int) -> tuple[int, int]:
    """Records and bytes from `floor_seq` on, once everything in flight is applied."""
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
    """The seq behind the records to evict from `seq` on; the newest record is kept."""
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
        # Behind the last live record before the newest: records deleted between are not lost.
        point = log.last_live_below(newest) + 1
    return max(seq, point)
