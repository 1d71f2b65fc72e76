"""Hypothesis drives one fsync topic against the plain model; long runs by seed drive many.

Every call is acknowledged before the next. So after any restart, `kill -9` or power loss the topic
must be exactly that of the model. Hypothesis shrinks a failure to a few steps.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.design7.bench import TOPIC, Bench
from tests.model.judging import differs
from tests.model.plain import Append, Delete, Drop, Plain, Put, Rec
from tests.model.simulation import Simulation, body_of
from topics_server.engine.answers import ReadRequest
from topics_server.values.appends import decode_append
from topics_server.values.model import Discard, Durability, TagMatch, TopicConfig

TAGS = st.sampled_from([None, "a", "a:1", "b"])
NODES = st.sampled_from([None, "n1", "n2"])
RECORDS = st.lists(st.tuples(TAGS, NODES, st.integers(0, 40)), min_size=1, max_size=6)
KEYS = st.sampled_from([None, None, "k1", "k2", "k3"])


class TopicMachine(RuleBasedStateMachine):
    """One topic of class fsync and its dict."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(cold_dir="cold", hot_retain_segments=1, segment_max_events=5)
        self.plain = Plain()
        self.number = 0

    @initialize()
    def create(self) -> None:
        self._put(TopicConfig(durability=Durability.FSYNC))

    @property
    def now_ms(self) -> int:
        return self.bench.world.clock.now_ms()

    @rule(records=RECORDS, key=KEYS, in_header=st.booleans())
    def append(
        self, records: list[tuple[str | None, str | None, int]], key: str | None, in_header: bool
    ) -> None:
        made = []
        for tag, node, size in records:
            self.number += 1
            made.append(Rec(b'{"n":%d,"p":"%b"}' % (self.number, b"x" * size), b"", tag, node, 0))
        fsync = TopicConfig(durability=Durability.FSYNC)
        step = Append(made, key, in_header, self.now_ms, self.now_ms, fsync)
        body = body_of(step)
        found = self.bench.world.run(
            self.bench.store.append(
                TOPIC,
                body,
                decode_append(body),
                header_key=key if in_header else None,
                config=fsync,
            )
        )
        count = found.last_seq - found.first_seq + 1
        answer = ("deduped" if found.deduped else "appended", found.first_seq, count)
        assert answer == self.plain.apply(step)

    @precondition(lambda self: self.plain.exists)
    @rule(match=st.sampled_from([None, "a", "a:", "b"]), share=st.floats(0, 1))
    def delete(self, match: str | None, share: float) -> None:
        before_seq = int(self.plain.head * share) + 1
        found = None if match is None else TagMatch(match, is_prefix=match.endswith(":"))
        answer = self.bench.world.run(
            self.bench.store.delete(TOPIC, before_seq=before_seq, match=found)
        )
        step = Delete(before_seq, found, self.now_ms, self.now_ms)
        assert ("deleted", answer.deleted) == self.plain.apply(step)

    @precondition(lambda self: self.plain.exists)
    @rule(cap_records=st.sampled_from([0, 0, 3, 9]), cap_bytes=st.sampled_from([0, 0, 60, 500]))
    def configure(self, cap_records: int, cap_bytes: int) -> None:
        self._put(
            TopicConfig(
                durability=Durability.FSYNC,
                cap_records=cap_records,
                cap_bytes=cap_bytes,
                discard=Discard.OLD,
            )
        )
        # A lowered cap evicts in the background, and its entry is applied some turns of the loop
        # later.
        self.bench.tend()
        self.bench.wait(0.01)
        self.plain.evict()

    def _put(self, config: TopicConfig) -> None:
        self.bench.world.run(self.bench.store.put_topic(TOPIC, config, keep_type=False))
        self.plain.apply(Put(config, self.now_ms, self.now_ms))

    @precondition(lambda self: self.plain.exists)
    @rule()
    def drop(self) -> None:
        assert self.bench.world.run(self.bench.store.drop_topic(TOPIC, if_empty=False))
        self.plain.apply(Drop())

    @rule(by_ms=st.sampled_from([-3_600_000, -1, 1, 5000]))
    def step_clock(self, by_ms: int) -> None:
        self.bench.world.clock.step(by_ms)

    @rule(seconds=st.sampled_from([0.01, 1.5]))
    def wait(self, seconds: float) -> None:
        self.bench.wait(seconds)

    @rule()
    def checkpoint(self) -> None:
        self.bench.checkpoint()

    @precondition(lambda self: self.plain.exists)
    @rule(force=st.booleans())
    def seal(self, force: bool) -> None:
        self.bench.tend(force_seal=force)

    @rule(how=st.sampled_from(["clean", "kill", "power"]))
    def begin_again(self, how: str) -> None:
        if how == "clean":
            self.bench.restart()
        else:
            self.bench.crash("kill" if how == "kill" else "power")

    @precondition(lambda self: self.plain.exists)
    @rule(nodes=st.sets(st.sampled_from(["n1", "n2", "n3"]), min_size=1))
    def read_without_nodes(self, nodes: set[str]) -> None:
        seen: list[int] = []
        cursor = 0
        for _ in range(200):
            request = ReadRequest(cursor, 3, 1 << 20, frozenset(nodes))
            page = self.bench.world.run(self.bench.store.read(TOPIC, request))
            seen += [piece.block.first_seq + row for piece in page.pieces for row in piece.rows]
            if page.caught_up:
                break
            cursor = page.next_from_seq
        assert seen == [s for s, rec in self.plain.records.items() if rec.node not in nodes]

    @invariant()
    def is_what_the_model_says(self) -> None:
        if not self.plain.exists:
            assert self.bench.node.registry.find(TOPIC) is None
            return
        assert differs(self.plain, self.bench.look(), may_jump=False) is None

    def teardown(self) -> None:
        self.bench.world.abandon()


TestTopic = TopicMachine.TestCase
TestTopic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_a_long_life_of_many_boots(seed: int) -> None:
    """The life is longer than those of the crash tests: it has more calls, boots and clean-ups."""
    Simulation(seed, boots=8, calls=40).run()
