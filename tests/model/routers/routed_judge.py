"""Judges whether routers work correctly: every submitted page, and every recovered state.

The judge sits between a node and its commits. A *page* is judged when it is submitted: every copied
record was live in its source and is copied by its router's rule; every skipped record was deleted,
filtered, over the hop cap or already held; losses of the source are reported once. A *restart* is
judged as soon as replay is over: each topic must be a prefix of its entries that holds all that was
certain, and each router must match its entries. A *seq* is noted when its record first becomes
visible, and must never be read as another record. Used by `routed`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from tests.model.routers.routed_truth import (
    Fact,
    Folded,
    Leeway,
    Rec,
    differs,
    live_seqs,
    records_of,
    seqs_of,
)
from tests.model.world import FakeClock
from topics_server.engine.answers import ReadRequest
from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.commit.projections import ProjectionOwner
from topics_server.engine.topic.applied import Applied
from topics_server.node.boot import Boot
from topics_server.node.ground import Ground
from topics_server.node.node import Node
from topics_server.routers.router_table import Router
from topics_server.values.entries import (
    RESERVED_ID_MIN,
    ROUTERS_ID,
    Entry,
    RecordsAppended,
    RecordsDeleted,
    RouterDeleted,
    RouterPage,
    RouterPut,
    TopicPut,
)
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Durability, Gate, Guarantee, LossReason, RouterDefinition

End = Literal["new", "clean", "kill", "power"]
_HOPS_MAX = 8
_Table = dict[int, RouterPut]


class Judge:
    """One data directory's history. `pages`, `bare`, `copies`: the number of judged ones."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        # The start that is being judged, and its node's commit pipeline.
        self.boot: Boot | None = None
        self.commits: CommitPipeline | None = None
        # For each FIFO: the state at the last start, and the entries since.
        self.base: dict[int, Folded] = defaultdict(Folded)
        self.now: dict[int, Folded] = defaultdict(Folded)
        self.facts: dict[int, list[Fact]] = defaultdict(list)
        self.base_table: _Table = {}
        self.table: _Table = {}
        # (topic id, seq) -> its record, for ever.
        self.meaning: dict[tuple[int, int], Rec] = {}
        # Up to which seq a router's source was judged, and which copy it made of which seq.
        self.covered: dict[int, int] = {}
        self.forwarded: dict[int, dict[int, int]] = defaultdict(dict)
        # Stamps that were ever in a topic: (topic id, key).
        self.stamps: set[tuple[int, str]] = set()
        # (topic id, seq) of every slot for a loss of a source.
        self.slots: set[tuple[int, int]] = set()
        # Topics of which a damaged snapshot may have noted facts that nothing else has.
        self.unnoted: set[int] = set()
        self.failures: list[AssertionError] = []
        self.synced: list[int] = []
        # The positions of the routers of the last node, noted or not.
        self.reached: dict[int, int] = {}
        self.pages = self.bare = self.copies = self.lost = self.held = 0

    # -- a node's actions ------------------------------------------------------------------

    def watch(self, boot: Boot, commits: CommitPipeline) -> None:
        """Observe every commit of a node from now on; its topics are recovered."""
        self.boot, self.commits = boot, commits
        submit = commits.submit

        def noted(
            entry: Entry, gate: Gate, owner: ProjectionOwner, *, urgent: bool = False
        ) -> Ticket:
            if isinstance(entry, RecordsAppended) and entry.page is not None:
                self._judge_page(entry, entry.page)
            fact = Fact(commits.next_lsn, entry, gate)
            facts = self.facts[entry.topic_id]
            facts.append(fact)
            try:
                ticket = submit(entry, gate, owner, urgent=urgent)
            except TopicsError:
                facts.remove(fact)
                raise
            ticket.waiters.append(lambda: self._settled(fact, ticket))
            return ticket

        commits.submit = noted  # type: ignore[method-assign]
        commits.observers.insert(0, self._applied)

    def _settled(self, fact: Fact, ticket: Ticket) -> None:
        if ticket.error is not None:
            is_unknown = ticket.error.code is Code.STORAGE_READ_ONLY
            fact.fate = "unknown" if is_unknown else "failed"

    def _applied(self, lsn: int, entry: Entry, applied: Applied) -> None:
        try:
            self._take(lsn, entry)
        except AssertionError as error:
            # Observers must not raise: the error is reported at the next check of the node.
            self.failures.append(error)

    def check(self) -> None:
        """Raise the errors found while entries were applied."""
        if self.failures:
            raise self.failures[0]

    def _take(self, lsn: int, entry: Entry) -> None:
        fact = next(fact for fact in reversed(self.facts[entry.topic_id]) if fact.lsn == lsn)
        fact.fate = "applied"
        if entry.topic_id == ROUTERS_ID:
            self._applied_router(entry)
        elif entry.topic_id < RESERVED_ID_MIN:
            if isinstance(entry, RecordsAppended):
                self._note_meaning(entry)
                if entry.page is not None:
                    self._note_page(entry, entry.page)
            self.now[entry.topic_id].apply(fact)

    def _note_meaning(self, entry: RecordsAppended) -> None:
        if entry.slot_count:
            self.slots.add((entry.topic_id, entry.first_seq))
        for seq, rec in records_of(entry):
            place = (entry.topic_id, seq)
            assert place not in self.meaning, f"{place} is given out again"
            self.meaning[place] = rec
            stamp = _stamp(rec.meta)
            if stamp is not None:
                self.stamps.add((entry.topic_id, stamp))

    def _note_page(self, entry: RecordsAppended, page: RouterPage) -> None:
        self.covered[page.router_id] = max(self.covered.get(page.router_id, 0), page.cursor_seq)
        for seq, (copy_seq, _) in zip(_page_seqs(page), records_of(entry), strict=True):
            self.forwarded[page.router_id][seq] = copy_seq

    def _applied_router(self, entry: Entry) -> None:
        if isinstance(entry, RouterPut):
            older = self.table.get(entry.router_id)
            if older is not None:
                self._judge_passed(older, entry.start_seq)
            self.covered[entry.router_id] = entry.start_seq
        _put_router(self.table, entry)

    # -- one page --------------------------------------------------------------------------

    def _judge_page(self, entry: RecordsAppended, page: RouterPage) -> None:
        assert self.boot is not None
        node = self.boot.node
        assert node is not None, "a page before there is a node"
        router = node.router_table.get(page.router_id)
        assert router is not None, "a page of a router that is gone"
        self.pages += 1
        self.bare += bool(page.copy_count) and not entry.body
        self.lost += bool(page.lost)
        put = self.table[page.router_id]
        cursor_seq, _ = node.pump.cursor(router)
        self._judge_passed(put, cursor_seq)
        source = self.now[page.source_id]
        taken = _page_seqs(page)
        self.copies += len(taken)
        assert taken == sorted(set(taken)), f"copies out of order: {taken}"
        assert all(cursor_seq < seq <= page.cursor_seq for seq in taken), f"{taken}, {page}"
        held = self._held_stamps(entry.topic_id)
        for seq, (_, copy) in zip(taken, records_of(entry), strict=True):
            self._judge_copy(router, seq, copy, held, source, bool(page.lost))
        lost = []
        for seq in range(cursor_seq + 1, page.cursor_seq + 1):
            if seq in taken or self._may_pass(put, source, seq):
                continue
            if seq in source.records and not self._is_expired(source, seq):
                raise AssertionError(f"router {router.name} passes over {seq} in silence: {page}")
            lost.append(seq)
        assert bool(lost) <= bool(page.lost), f"{router.name}: {lost} are lost, {page}"
        if page.lost:
            gone = set(range(cursor_seq + 1, page.cursor_seq + 1)) - set(source.records)
            expired = [seq for seq in source.records if self._is_expired(source, seq)]
            assert gone or expired, f"{router.name}: nothing is lost, {page}"

    def _judge_copy(
        self,
        router: Router,
        seq: int,
        copy: Rec,
        held: set[str],
        source: Folded,
        has_lost: bool,
    ) -> None:
        definition = router.definition
        rec = self.meaning[router.source_id, seq]
        assert seq in source.records, f"{router.name}: {seq} of {router.source_id} is gone"
        assert _wants(definition, rec), f"{router.name} wants nothing of {rec}"
        assert copy.data == rec.data
        assert copy.tag == (rec.tag if definition.preserve_tag else None)
        assert copy.node == (rec.node if definition.preserve_node else None)
        assert copy.hops == rec.hops + 1
        if definition.guarantee is not Guarantee.EXACTLY_ONCE:
            assert copy.meta == rec.meta
            return
        key = self._key(self.table[router.router_id], seq)
        assert key not in held, f"{router.name} doubles {key}"
        meta = json.loads(copy.meta)
        stamp = meta.pop("_topics_router")
        epoch = int(key.split("/")[2])
        assert stamp == {"source": definition.source, "epoch": epoch, "seq": seq, "key": key}
        own = json.loads(rec.meta or b"{}")
        own.pop("_topics_router", None)
        assert meta == own

    def _key(self, put: RouterPut, seq: int) -> str:
        assert self.boot is not None
        topic = self.boot.ground.registry.get(put.source_id)
        epoch = 0 if topic is None else topic.epoch
        return f"{put.name}/{put.definition.source}/{epoch}/{seq}"

    def _held_stamps(self, topic_id: int) -> set[str]:
        """The stamps of the copies in a destination, those in flight too."""
        fold = self.now[topic_id]
        if fold.was_ephemeral:
            # Its cursors were lost with its records: copies come again, whatever the guarantee.
            return set()
        held = [rec for seq, rec in fold.records.items() if not self._is_expired(fold, seq)]
        stamps = [_stamp(rec.meta) for rec in held]
        for fact in self.facts[topic_id]:
            if fact.fate == "pending" and isinstance(fact.entry, RecordsAppended):
                stamps += [_stamp(rec.meta) for _, rec in records_of(fact.entry)]
        return {stamp for stamp in stamps if stamp is not None}

    def _may_pass(self, put: RouterPut, source: Folded, seq: int) -> bool:
        """Whether a router may skip a seq of its source without reporting it."""
        if seq in source.deleted:
            return True
        if put.definition.allow_cycle and (put.source_id, seq) in self.slots:
            return True
        rec = self.meaning.get((put.source_id, seq))
        if rec is None:
            # If the newest snapshot was damaged, it is no longer recorded that a start skipped
            # these seqs.
            return put.source_id in self.unnoted
        if not _wants(put.definition, rec):
            return True
        if put.definition.guarantee is Guarantee.EXACTLY_ONCE and seq <= put.known_seq:
            is_held = (put.dest_id, self._key(put, seq)) in self.stamps
            self.held += is_held
            return is_held
        return False

    def _judge_passed(self, put: RouterPut, cursor_seq: int) -> None:
        """Judge the seqs that a router passed without a page since the last time."""
        covered = self.covered.get(put.router_id, cursor_seq)
        source = self.now[put.source_id]
        for seq in range(covered + 1, cursor_seq + 1):
            assert self._may_pass(put, source, seq), (
                f"router {put.name} passed {seq} of {covered + 1}..{cursor_seq} without a page"
            )
        self.covered[put.router_id] = max(covered, cursor_seq)

    def _is_expired(self, source: Folded, seq: int) -> bool:
        ttl_ms = source.config.ttl_ms
        return bool(ttl_ms) and source.records[seq].ts < self.clock.max_ms - ttl_ms

    # -- a start ---------------------------------------------------------------------------

    def note_end(self) -> None:
        """The node is about to be killed, or was: note how far each of its shards was synced."""
        self.synced = [] if self.commits is None else list(self.commits._synced_lsn)
        if self.boot is not None and self.boot.node is not None:
            self.reached = self._cursors(self.boot.node)
            for router_id, cursor_seq in self.reached.items():
                self._judge_passed(self.table[router_id], cursor_seq)
        self.boot = self.commits = None

    def _cursors(self, node: Node) -> dict[int, int]:
        return {router.router_id: node.pump.cursor(router)[0] for router in node.router_table}

    def recovered(
        self, ground: Ground, end: End, *, damaged: bool, was_doubted: bool = False
    ) -> None:
        """Replay is over and nothing new was submitted: judge the recovered state.

        `was_doubted`: see `World`.
        """
        self.check()
        registry = ground.registry
        if damaged:
            self.unnoted.update(registry.ids())
        kept: dict[int, Folded] = {}
        ids = set(self.base) | set(self.facts) | set(registry.ids())
        for topic_id in sorted(ids):
            if topic_id >= RESERVED_ID_MIN:
                continue
            topic = registry.get(topic_id)
            wrong = []
            for count, fold, gone in self._candidates(topic_id, end):
                if damaged and fold.was_ephemeral:
                    # The unreadable snapshot had recorded which records restarts removed from the
                    # topic.
                    back = set() if topic is None else live_seqs(topic) - set(fold.records)
                    fold.records.update(
                        (seq, self.meaning[topic_id, seq])
                        for seq in back
                        if (topic_id, seq) in self.meaning
                    )
                may_jump = end == "power" or damaged or (was_doubted and end != "clean")
                leeway = Leeway(end != "new", may_jump, gone, self.reached)
                found = differs(fold, topic, leeway)
                if found is None:
                    kept[topic_id] = fold
                    break
                wrong.append(f"first {count}: {found}")
            else:
                facts = "\n  ".join(
                    f"{f.lsn} {f.gate.name} {f.fate} {_brief(f.entry)}"
                    for f in self.facts[topic_id]
                )
                raise AssertionError(
                    f"topic {topic_id} after {end}, synced {self.synced}: no prefix fits\n "
                    + "\n ".join(wrong)
                    + f"\n  {facts}"
                )
        for topic_id, fold in kept.items():
            for fact in self.facts[topic_id]:
                self._note_unanswered(fact, fold)
            if not fold.name:
                self._forget(topic_id)
        self._recovered_routers(ground, end, kept)
        for topic_id, fold in kept.items():
            topic = registry.get(topic_id)
            if topic is not None:
                live = live_seqs(topic)
                fold.records = {seq: rec for seq, rec in fold.records.items() if seq in live}
                fold.head, fold.floor = topic.log.head_seq, topic.log.evict_floor
                fold.slots = {
                    seq: missed
                    for seq, missed in fold.slots.items()
                    if any(
                        h.first_seq <= seq <= h.last_seq and h.reason is LossReason.SOURCE_TRIM
                        for h in topic.log.holes
                    )
                }
                # An older snapshot lists fewer of the seqs passed without a page.
                fold.cursors = {
                    router_id: (
                        min(cursor.seq, fold.cursors.get(router_id, (0, 0))[0]),
                        cursor.copy_count,
                    )
                    for router_id, cursor in topic.cursors.items()
                }
        self.base = defaultdict(Folded, kept)
        self.now = defaultdict(Folded, {key: fold.copy() for key, fold in kept.items()})
        self.facts = defaultdict(list)
        self.base_table = dict(self.table)

    def _note_unanswered(self, fact: Fact, fold: Folded) -> None:
        """An append without an answer may exist nevertheless."""
        entry = fact.entry
        if fact.fate not in ("pending", "unknown") or not isinstance(entry, RecordsAppended):
            return
        if entry.first_seq + entry.count - 1 <= fold.head:
            self._note_meaning(entry)
            if entry.page is not None:
                self._note_page(entry, entry.page)

    def _forget(self, topic_id: int) -> None:
        """Forget a topic that was lost with its unsynced creation."""
        self.meaning = {at: rec for at, rec in self.meaning.items() if at[0] != topic_id}
        self.slots = {at for at in self.slots if at[0] != topic_id}
        self.stamps = {at for at in self.stamps if at[0] != topic_id}

    def _candidates(self, topic_id: int, end: End) -> Iterator[tuple[int, Folded, frozenset[int]]]:
        """The states that a topic may have, the longest prefix first."""
        facts = [fact for fact in self.facts[topic_id] if fact.fate != "failed"]
        certain = self._certain(facts, end)
        fold = self.base[topic_id].copy()
        folds = []
        for count in range(len(facts) + 1):
            if count:
                fold.apply(facts[count - 1])
            if count >= certain:
                folds.append((count, fold.copy()))
        for count, state in reversed(folds):
            lost = [fact.entry for fact in facts[count:]]
            deletes = [entry for entry in lost if isinstance(entry, RecordsDeleted)]
            gone = frozenset(seq for entry in deletes for seq in seqs_of(entry))
            yield count, state, gone

    def _certain(self, facts: list[Fact], end: End) -> int:
        if end == "clean":
            return len(facts)
        certain = 0
        for number, fact in enumerate(facts, 1):
            if not fact.has_frame or fact.fate != "applied":
                continue
            shard = 0
            if fact.entry.topic_id < RESERVED_ID_MIN and self.synced:
                shard = fact.entry.topic_id % len(self.synced)
            if end != "power" or (self.synced and fact.lsn <= self.synced[shard]):
                certain = number
        return certain

    def _recovered_routers(self, ground: Ground, end: End, kept: dict[int, Folded]) -> None:
        facts = [fact for fact in self.facts[ROUTERS_ID] if fact.fate != "failed"]
        certain = self._certain(facts, end)
        found = {router.router_id: router for router in ground.router_table}
        tables = []
        table = dict(self.base_table)
        for count in range(len(facts) + 1):
            if count:
                _put_router(table, facts[count - 1].entry)
            if count >= certain:
                tables.append(
                    {
                        router_id: put
                        for router_id, put in table.items()
                        if _exists(kept, put.source_id) and _exists(kept, put.dest_id)
                    }
                )
        wrong = []
        for table in reversed(tables):
            wrong.append(_tables_differ(table, found))
            if wrong[-1] is None:
                break
        else:
            raise AssertionError(f"routers after {end}: {wrong}")
        for router_id, put in table.items():
            self._judge_cursor(ground, found[router_id], put, kept)
        self.table = table
        self.covered = {key: _noted_cursor(ground, found[key]) for key in table}

    def _judge_cursor(
        self, ground: Ground, router: Router, put: RouterPut, kept: dict[int, Folded]
    ) -> None:
        """Check that no router has passed a record that its source has, while its copy is lost."""
        dest, source = kept[put.dest_id], kept[put.source_id]
        if dest.config.durability is Durability.EPHEMERAL or dest.was_ephemeral:
            return
        topic = ground.registry.get(put.dest_id)
        assert topic is not None
        cursor_seq = _noted_cursor(ground, router)
        for seq, copy_seq in self.forwarded[put.router_id].items():
            if seq <= cursor_seq and seq in source.records:
                assert copy_seq <= dest.head, (
                    f"router {put.name}: the copy {copy_seq} of {seq} is lost and never comes "
                    f"again, it goes on from {cursor_seq}"
                )

    # -- checking the running node ---------------------------------------------------------

    async def look(self, node: Node) -> None:
        """Read every topic and compare; no call may be in flight."""
        for topic in list(node.registry):
            if node.registry.get(topic.topic_id) is topic:
                await self._look_at(node, topic.topic_id, topic.name)

    async def _look_at(self, node: Node, topic_id: int, name: str) -> None:
        seen: dict[int, Rec] = {}
        told: set[int] = set()
        from_seq = 0
        while True:
            page = await node.store.read(name, ReadRequest(from_seq, 500, 1 << 22))
            if page.gap is not None and page.gap.reason is LossReason.SOURCE_TRIM:
                assert page.gap.missed_estimate > 0
                told.update(range(page.gap.gap_from, page.gap.gap_to + 1))
            for piece in page.pieces:
                block = piece.block
                for row in piece.rows:
                    seq = block.first_seq + row
                    seen[seq] = Rec(
                        bytes(block.data(row)),
                        bytes(block.meta(row)),
                        block.tags[row],
                        block.nodes[row],
                        block.hops[row],
                        block.times[row],
                    )
            if page.caught_up:
                break
            assert page.next_from_seq > from_seq
            from_seq = page.next_from_seq
        topic = node.registry.get(topic_id)
        fold = self.now[topic_id]
        for seq, rec in seen.items():
            known = self.meaning.get((topic_id, seq))
            assert known == rec, f"{name} ({topic_id}) seq {seq} is {rec}, not {known}"
        alive = frozenset(router.router_id for router in node.router_table)
        wrong = differs(fold, topic, Leeway(cursors=self._cursors(node), routers=alive))
        assert wrong is None, f"{name} ({topic_id}), live: {wrong}"
        for seq in set(fold.records) - set(seen):
            assert self._is_expired(fold, seq), f"{name}: seq {seq} is not read"
        if not fold.config.ttl_ms:
            missing = set(fold.slots) - told
            assert not missing, f"{name}: what the source lost is not told: {missing}"

    def caught_up(self, node: Node) -> list[str]:
        """Routers that are not at their source's head; the others are judged."""
        self.check()
        behind = []
        for router in node.router_table:
            source = node.registry.get(router.source_id)
            assert source is not None
            cursor_seq, _ = node.pump.cursor(router)
            if cursor_seq < source.log.head_seq:
                behind.append(router.name)
            else:
                self._judge_passed(self.table[router.router_id], cursor_seq)
        return behind


def _put_router(table: _Table, entry: Entry) -> None:
    if isinstance(entry, RouterPut):
        for router_id in [key for key, put in table.items() if put.name == entry.name]:
            if router_id != entry.router_id:
                del table[router_id]
        table[entry.router_id] = entry
    elif isinstance(entry, RouterDeleted):
        table.pop(entry.router_id, None)


def _exists(kept: dict[int, Folded], topic_id: int) -> bool:
    return topic_id in kept and kept[topic_id].exists


def _tables_differ(table: _Table, found: dict[int, Router]) -> str | None:
    if set(table) != set(found):
        return f"routers {sorted(found)}, not {sorted(table)}"
    for router_id, put in table.items():
        router = found[router_id]
        is_same = (router.name, router.definition, router.source_id, router.dest_id) == (
            put.name,
            put.definition,
            put.source_id,
            put.dest_id,
        )
        if not is_same or (router.start_seq, router.known_seq) != (put.start_seq, put.known_seq):
            return f"router {router_id} is {router}, not {put}"
    return None


def _page_seqs(page: RouterPage) -> list[int]:
    runs = zip(page.firsts, page.lasts, strict=True)
    return [seq for first, last in runs for seq in range(first, last + 1)]


def _wants(definition: RouterDefinition, rec: Rec) -> bool:
    match = definition.filter
    if match is not None:
        if rec.tag is None:
            return False
        if match.is_prefix and not rec.tag.startswith(match.text):
            return False
        if not match.is_prefix and rec.tag != match.text:
            return False
    return rec.hops < _HOPS_MAX or not definition.allow_cycle


def _stamp(meta: bytes) -> str | None:
    if b'"_topics_router"' not in meta:
        return None
    key = json.loads(meta)["_topics_router"]["key"]
    assert isinstance(key, str)
    return key


def _brief(entry: Entry) -> str:
    if isinstance(entry, RecordsAppended):
        page = entry.page
        what = ""
        if page is not None:
            runs = f"{page.firsts}..{page.lasts} lost {page.lost} to {page.cursor_seq}"
            what = f" page of {page.router_id}: {runs}"
        return f"append {entry.first_seq}+{entry.count} floor {entry.floor}{what}"
    if isinstance(entry, TopicPut):
        return f"put {entry.name} {entry.config.durability}"
    if isinstance(entry, RecordsDeleted):
        return f"delete {seqs_of(entry)}"
    return str(entry)


def _noted_cursor(ground: Ground, router: Router) -> int:
    """A router's position before there is a pump."""
    dest = ground.registry.get(router.dest_id)
    at = None if dest is None else dest.cursors.get(router.router_id)
    return router.start_seq if at is None else max(router.start_seq, at.seq)
