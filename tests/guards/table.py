"""The guards: which line enforces which rule, and which tests fail without the line.

`check` takes them out one at a time; `test_table` keeps the texts in step with the source.
`OLD` occurs once in its file under `src/topics_server`. A new guard of the same kind gets a line
here, in `garbage`, `objects`, `sealed` or `starts`; docs/GUARDS.md is written from this table.
"""

from __future__ import annotations

from typing import Final

from tests.guards.garbage import GARBAGE
from tests.guards.guard import Guard, guards
from tests.guards.objects import OBJECTS
from tests.guards.sealed import SEALED
from tests.guards.starts import STARTS

GUARDS: Final[list[Guard]] = [
    *guards(
        "engine/commit/gates.py",
        "unit/engine/commit/test_gates.py",
        (
            "a drop is synced",
            "    TopicDropped: SYNCED,",
            "    TopicDropped: WRITTEN,",
        ),
        (
            "reserved heads are synced",
            "    HeadReserved: SYNCED,",
            "    HeadReserved: WRITTEN,",
        ),
        (
            "durable leases are synced",
            "    LeasesGranted: SYNCED,",
            "    LeasesGranted: WRITTEN,",
        ),
        (
            "a creating append is synced",
            "CREATES_TOPIC: Final = SYNCED",
            "CREATES_TOPIC = WRITTEN",
        ),
        (
            "a move's copy is synced before the original is deleted",
            "gate = TAKES_OVER[durability]",
            "pass",
        ),
        (
            "an append that closes its stream is journaled",
            "gate = max(gate, CLOSES_STREAM[durability])",
            "pass",
        ),
        (
            "an append that evicts journaled records is journaled",
            "gate = max(gate, _gate_of_removal(topic))",
            "pass",
        ),
        (
            "a delete of journaled records is journaled",
            "touches_journaled = topic.journaled_seq >= topic.log.earliest_seq",
            "touches_journaled = False",
        ),
    ),
    *guards(
        "engine/preconditions.py",
        "unit/engine/test_preconditions.py",
        (
            "a router's page waits for its destination's name",
            "Write.ROUTER_PAGE: (Need.STABLE_NAME, Need.DISK_ROOM,",
            "Write.ROUTER_PAGE: (Need.DISK_ROOM,",
        ),
        (
            "a creating append counts against the quota of topics",
            "Need.DISK_ROOM, Need.TOTAL_BYTES, Need.TOPICS)",
            "Need.DISK_ROOM, Need.TOTAL_BYTES)",
        ),
        (
            "the quota of bytes refuses",
            "if limit and self._registry.bytes_live + payload_bytes > limit:",
            "if False:",
        ),
    ),
    *guards(
        "engine/preconditions.py",
        "unit/engine/test_store.py",
        (
            "a tail that is not sealed bounds appends by bytes too",
            "log.tail_count > quotas.max_tail_records or log.tail_bytes > quotas.max_tail_bytes",
            "log.tail_count > quotas.max_tail_records",
        ),
    ),
    *guards(
        "engine/topic/retention.py",
        "unit/engine/topic/test_retention.py",
        (
            "what was found expired stays expired",
            "return log.expired_seq > earliest",
            "return log.time_of(earliest) < since_ms",
        ),
        (
            "a full topic that rejects refuses",
            "if config.discard is Discard.REJECT:",
            "if False:",
        ),
        (
            "a floor of caps and TTL says that it is both",
            "LossReason.CAP if expired == start else LossReason.MIXED",
            "LossReason.CAP",
        ),
        (
            "the newest record stays",
            "newest = first_seq + decoded.count - 1",
            "newest = first_seq + decoded.count",
        ),
    ),
    *guards(
        "engine/topic/retention.py",
        "unit/engine/topic/test_retention_holds.py",
        (
            "caps wait for the slowest of several consumers",
            "kept = first if kept is None else min(kept, first)",
            "kept = first",
        ),
        (
            "a hold has bounds",
            "first = max(first, _evict_point(log, staging, seq, beyond, decoded, slots))",
            "pass",
        ),
    ),
    *guards(
        "engine/topic/producers.py",
        "unit/engine/topic/test_producers.py",
        (
            "an older epoch is fenced",
            "if stamp.epoch < last.epoch:",
            "if False:",
        ),
        (
            "a gap in a producer's sequence is refused",
            "if stamp.seq > expected:",
            "if False:",
        ),
        (
            "an unknown producer begins with 0",
            "raise _gap(stamp, 0)",
            "pass",
        ),
        (
            "producers of a topic are bounded",
            "self._check_room(now_ms)\n",
            "pass\n",
        ),
        (
            "a producer is forgotten after its time",
            "if known is None or now_ms - known.ts >= PRODUCER_KEPT_MS:",
            "if known is None:",
        ),
        (
            "requests in flight count",
            "if staged is not None:\n            return staged[-1]",
            "if False:\n            return staged[-1]",
        ),
        (
            "the oldest producer is forgotten first",
            "known.move_to_end(producer_id)",
            "pass",
        ),
    ),
    *guards(
        "engine/topic/dedupe.py",
        "unit/engine/topic/test_dedupe.py",
        (
            "a key in flight is a duplicate",
            "if staged is not None:\n            return staged\n",
            "if False:\n            return staged\n",
        ),
        (
            "a key ends with its window",
            "if known is None or now_ms - known[2] >= window_ms:",
            "if known is None:",
        ),
        (
            "keys of a topic are bounded",
            "if len(remembered) <= DEDUPE_KEYS_PER_TOPIC_MAX and (",
            "if (",
        ),
        (
            "each record's key ends with its window",
            "seq = first_seq if now_ms - ts < window_ms else 0",
            "seq = first_seq",
        ),
    ),
    *guards(
        "queue/leases/lease_table.py",
        "unit/queue/leases/test_lease_table.py",
        (
            "an undone lease entry frees its jobs",
            "                book.undo(entry)",
            "                pass",
        ),
        (
            "leases keep their length when the clock is set",
            "            book.shift(by_ms)",
            "            pass",
        ),
        (
            "an entry decided before the clock was set is shifted",
            "self._committed_shift_ms = self._shifted_ms - shifted_ms",
            "self._committed_shift_ms = 0",
        ),
        (
            "a redriven job is no dead letter",
            "not source.is_redrive and source.topic_id",
            "source.topic_id",
        ),
    ),
    *guards(
        "auth/authorize.py",
        "unit/auth/test_authorize.py",
        (
            "a ticket ends with its key",
            "if caller is None or caller.key not in key_ring.keys:",
            "if caller is None:",
        ),
        (
            "a key needs the scopes",
            "check_scopes(caller, max(need, ANY_KEY))",
            "pass",
        ),
        (
            "a key needs all scopes",
            "if caller.scopes & scopes == scopes:",
            "if caller.scopes & scopes or not scopes:",
        ),
        (
            "a key opens only its prefixes",
            "if not caller.may_name(name):",
            "if False:",
        ),
        (
            "probes may be covered by keys",
            "(need == PROBE and not key_ring.covers_probes)",
            "need == PROBE",
        ),
    ),
    *guards(
        "auth/tickets.py",
        "unit/auth/test_tickets.py",
        (
            "a ticket opens its own session only",
            "if found is None or found[0] != wid:",
            "if found is None:",
        ),
        (
            "a ticket is used once",
            "self._open.pop(_digest(ticket), None)",
            "self._open.get(_digest(ticket))",
        ),
        (
            "tickets are bounded",
            "self._open.popitem(last=False)",
            "pass",
        ),
        (
            "a ticket expires",
            "if until_ms > now_ms:",
            "if True:",
        ),
    ),
    *guards(
        "auth/live_tickets.py",
        "unit/auth/test_live_tickets.py",
        (
            "a live ticket expires",
            " and now_ms < until_ms",
            "",
        ),
        (
            "a live ticket opens its own stream only",
            'b"%d\\0%b" % (until_ms, subscription)',
            'b"%d" % until_ms',
        ),
        (
            "a live ticket is of its key",
            "hashlib.sha256(_SECRET + key.digest).digest()",
            "hashlib.sha256(_SECRET).digest()",
        ),
    ),
    *guards(
        "auth/origin.py",
        "unit/auth/test_origin.py",
        (
            "a foreign page may change nothing",
            "if fetch_site in _OTHER_SITES:",
            "if False:",
        ),
        (
            "an origin must be the host's",
            "return authority == host.lower().removesuffix(own_port)",
            "return True",
        ),
        (
            "an escaped name of a parameter counts",
            ' or b"%" in query)',
            ")",
        ),
    ),
    *guards(
        "auth/hosts.py",
        "unit/auth/test_hosts.py",
        (
            "a foreign Host is refused",
            "if normal_host(name) not in self._names:",
            "if False:",
        ),
    ),
    *guards(
        "settings/key_file.py",
        "unit/settings/test_key_file.py",
        (
            "a key file that others read is refused",
            "if not is_shared and mode & _forbidden_mode(path, credentials):",
            "if False:",
        ),
        (
            "a key file is a file",
            "if not stat.S_ISREG(mode):",
            "if False:",
        ),
        (
            "a key file is bounded",
            "if len(content) > _BYTES_MAX:",
            "if False:",
        ),
    ),
    *guards(
        "wal/journal/anchors.py",
        "storage/journal/test_anchors.py",
        (
            "FORMAT is not older than an end mark",
            "if mark.run > anchors.run:",
            "if False:",
        ),
        (
            "an end mark is not older than FORMAT",
            "if index + 1 == len(wal_sets) and mark.run < anchors.journal_run:",
            "if False:",
        ),
        (
            "written groups are there in the same boot",
            "if position < mark.written_end and same_boot and not mark.is_syncing:",
            "if False:",
        ),
        (
            "a journal file keeps its length",
            "if found.size < header.declared_bytes and found.size != position:",
            "if False:",
        ),
    ),
    *guards(
        "wal/journal/file_chain.py",
        "storage/journal/test_replay.py storage/journal/test_anchors.py design7/test_mistakes.py",
        (
            "a journal reaches back to the snapshot",
            "if after_lsn >= max(start_lsn, 1):",
            "if 0:",
        ),
        (
            "no journal file is missing in the chain",
            "if needed and opening.previous_number != found.header.number:",
            "if False:",
        ),
        (
            "a journal file has its own name",
            "if found.name != name:",
            "if False:",
        ),
        (
            "a damaged file header is not an empty file",
            "if any(_dirty_ends(file, FILE_HEADER_BYTES, size)):",
            "if False:",
        ),
        (
            "every shard has a file",
            "if (wal_set, shard) not in present:",
            "if False:",
        ),
    ),
    *guards(
        "values/file_inventory.py",
        "unit/values/test_file_inventory.py",
        (
            "flags that lost deletes are damage",
            "return not self.is_touched or self.known_dead < self.anchored_dead",
            "return not self.is_touched",
        ),
        (
            "flags that no delete explains are damage",
            "return not self.is_touched or",
            "return",
        ),
        (
            "an older manifest is noticed",
            "if 0 < found.generation < must_be:",
            "if False:",
        ),
        (
            "a missing manifest is noticed",
            "if found.generation == 0 and must_be > 0 and not found.objections:",
            "if False:",
        ),
        (
            "a folder that nothing knows refuses the start",
            "if topic_id >= next_topic_id:",
            "if 0:",
        ),
        (
            "records that nothing else knows refuse the start",
            "if stray.last_seq > topic.head_seq",
            "if False",
        ),
        (
            "a replayed delete explains only the segments it hits",
            "if at < len(starts) and int(starts[at]) <= suspect.last_seq:",
            "if at < len(starts):",
        ),
    ),
    *guards(
        "engine/topic/topic.py",
        "design7/test_mistakes.py",
        (
            "deletes during a seal stay pending",
            "self.files.add_pending(flips)\n        return",
            "return",
        ),
    ),
    *guards(
        "http/upload_budget.py",
        "unit/http/test_upload_budget.py",
        (
            "a complete upload is not refused",
            "self._shares[upload.key].take_out(upload)",
            "pass",
        ),
        (
            "uploads of the key with the most bytes are refused",
            "max(shares, key=lambda share: share.bytes, default=None)",
            "next(iter(shares), None)",
        ),
        (
            "a body that gets on is refused last",
            "share.large[upload] = None",
            "share.small[upload] = None",
        ),
    ),
    *guards(
        "engine/read/page.py",
        "unit/engine/read/test_page.py model/reads/test_plain_reads.py",
        (
            "rows are weighed if the page may go on after them",
            "return run is self.log.runs[-1] and",
            "return",
        ),
        (
            "rows that may not fit are weighed",
            "return _bytes_at_most(run, row, stop) <= self.bytes_left",
            "return True",
        ),
        (
            "sealed rows are taken without weighing only within their bound",
            "run.index.bytes_at_most(row, stop)",
            "0",
        ),
        (
            "rows of the last run are weighed unless all of it fits",
            "run is self.log.runs[-1] and run.live_bytes <= self.bytes_left",
            "run is self.log.runs[-1] and _bytes_at_most(run, row, stop) <= self.bytes_left",
        ),
        (
            "a page is a span only if it ends there and has no other rows",
            "if self.may_span and self.is_full and not self.pieces and first_row < row:",
            "if self.may_span:",
        ),
        (
            "a topic with holes looks for a gap",
            "if ttl_ms == 0 and not log.holes and",
            "if ttl_ms == 0 and",
        ),
        (
            "a cursor below the floor gets a gap",
            "log.evict_floor <= seq <= log.head_seq + 1:",
            "seq <= log.head_seq + 1:",
        ),
        (
            "a cursor behind the head gets a gap",
            "log.evict_floor <= seq <= log.head_seq + 1:",
            "log.evict_floor <= seq:",
        ),
    ),
    *guards(
        "api/records/handlers.py",
        "unit/api/test_direct_turns.py",
        (
            "a diff that may wait for records has a task under pressure",
            "        if asked.wait_ms:\n            return _diff_in_turn",
            "        if False:\n            return _diff_in_turn",
        ),
    ),
    *guards(
        "api/direct.py",
        "unit/api/test_direct_turns.py",
        (
            "answers of a crowd leave at the end of the turn",
            "is_put_off = others >= _CROWD and not connection.is_late",
            "is_put_off = False",
        ),
        (
            "answers to few clients leave at once",
            "is_put_off = others >= _CROWD and",
            "is_put_off =",
        ),
        (
            "answers that waited for a commit leave at once",
            "                connection.is_late = True\n",
            "",
        ),
        (
            "the loop polls only for the client of the last answer",
            "        if others:\n            polling.streak = 0",
            "        if False:\n            polling.streak = 0",
        ),
    ),
    *guards(
        "http/connection.py",
        "unit/api/test_direct_turns.py",
        (
            "a client that sends no more gets the answers that are held",
            "        self.transport.flush()\n\n    def pause_writing",
            "\n    def pause_writing",
        ),
    ),
    *guards(
        "http/exchange/joined_writes.py",
        "unit/http/exchange/test_joined_writes.py",
        (
            "one answer is put off, not those after it",
            "is_put_off, self.is_put_off = self.is_put_off, False",
            "is_put_off = self.is_put_off",
        ),
    ),
    *guards(
        "runtime/busy_polling.py",
        "unit/runtime/test_busy_polling.py",
        (
            "the loop polls after a request only if it came soon",
            "self.streak + 1 if is_soon else 0",
            "self.streak + 1",
        ),
        (
            "the loop polls only after a row of such requests",
            "if self.streak >= _STREAK:",
            "if is_soon:",
        ),
        (
            "the loop polls for a short time",
            "if monotonic_s() * 1000 < self._until_ms and self.is_resting():",
            "if self.is_resting():",
        ),
        (
            "the loop sleeps while another thread works",
            " and self.is_resting():",
            ":",
        ),
    ),
    *GARBAGE,
    *SEALED,
    *OBJECTS,
    *STARTS,
]
