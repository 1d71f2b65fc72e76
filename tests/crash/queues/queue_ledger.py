"""The workers' view of a killed server's queues, and the verdict: is a job lost or done twice?

Pure. All data are added after the run: the enqueued jobs, every lease that a worker got (`Grant`),
every effect, every ack, nack and extend with its answer (`Call`), the lives of the server, the dead
letters. Times are ms of one wall clock; those of the server are whole ms. For an unknown result (no
answer, or an answer that nobody read) both outcomes are allowed.

A lease *may be over* at a time if an event that could end it had begun by then. It *is over* if it
had surely ended. A later holder requires that the lease may be over. A call under a lease is
refused if the lease is over, and accepted if it cannot be over.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

# A worker's clock is finer than the server's: smaller differences give no order.
_TICK_MS = 1.0

Key = tuple[str, int]  # of a job: queue, seq


@dataclass(slots=True, frozen=True)
class Queue:
    """The configuration of a queue. `max_deliveries`: 0 if the queue dead-letters nothing."""

    name: str
    is_durable: bool  # lease time of its claims
    max_deliveries: int


@dataclass(slots=True, frozen=True)
class Job:
    """One job as its producer knows it."""

    id: str
    queue: str
    seq: int
    delay_ms: int = 0


@dataclass(slots=True, frozen=True)
class Grant:
    """One delivery as a worker got it. `stream` is empty for a claim."""

    queue: str
    id: str
    seq: int
    lease_id: str
    node: str
    deliveries: int
    claimed_ms: int
    deadline_ms: int
    ts: int
    stream: str = ""


@dataclass(slots=True, frozen=True)
class Effect:
    """The effect of a job by a worker."""

    queue: str
    id: str
    seq: int
    lease_id: str
    node: str
    deliveries: int
    at_ms: float


@dataclass(slots=True)
class Call:
    """One ack, nack or extend. `value_ms` is its delay or lease."""

    kind: Literal["ack", "nack", "extend"]
    queue: str
    node: str
    seqs: list[int]
    lease_ids: list[str] | None
    sent_ms: float
    value_ms: int = 0
    got_ms: float | None = None
    done: int = 0
    skipped: list[int] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Whether it has an answer."""
        return self.got_ms is not None


@dataclass(slots=True, frozen=True)
class Life:
    """One run of the server: it does nothing before `began_ms` or after `ended_ms`.

    `stopped_ms` is the time at which the test requested the end of the run.
    """

    began_ms: float
    stopped_ms: float
    ended_ms: float
    is_clean: bool


@dataclass(slots=True, frozen=True)
class Letter:
    """One record of a dead-letter topic."""

    id: str
    queue: str
    seq: int
    deliveries: int
    ts: int


@dataclass(slots=True, frozen=True)
class End:
    """The state of a queue when all work is done."""

    queue: str
    count: int
    ready: int
    in_flight: int
    delayed: int
    dead_lettered: int


@dataclass(slots=True, frozen=True)
class _Use:
    """A call from the view of one lease."""

    call: Call
    is_done: bool
    is_certain: bool  # the call meant this lease and not another one of this node


class Ledger:
    """What the clients of one run have seen: jobs, leases and effects."""

    def __init__(self, queues: list[Queue]) -> None:
        self.queues = {queue.name: queue for queue in queues}
        self.jobs: dict[str, Job] = {}
        self.grants: list[Grant] = []
        self.effects: list[Effect] = []
        self.calls: list[Call] = []
        self.lives: list[Life] = []
        self.letters: list[Letter] = []
        self.ends: list[End] = []
        # When each stream ended, closed by its worker or by the worker's death.
        self.closed: dict[str, float] = {}
        self._history: dict[Key, list[Grant]] = {}
        self._claimed: dict[Key, list[int]] = {}
        self._by_lease: dict[tuple[str, int, str], Grant] = {}
        self._uses: dict[str, list[_Use]] = {}
        self._began: list[float] = []

    def check(self) -> list[str]:
        """All problems; empty if every promise was kept."""
        wrong = [*self._index(), *self._index_calls()]
        for history in self._history.values():
            wrong += self._check_history(history)
        for call in self.calls:
            wrong += self._check_call(call)
        return [*wrong, *self._check_effects(), *self._check_outcomes(), *self._check_ends()]

    def figures(self) -> dict[str, int]:
        """The number of events of each kind: a run without events of a kind proves nothing about
        it.
        """
        by_job = Counter(grant.id for grant in self.grants)
        known = [call for call in self.calls if call.is_known]
        kinds = Counter(call.kind for call in known)
        skipped = Counter[str]()
        for call in known:
            skipped[call.kind] += len(call.skipped)
        return {
            "jobs": len(self.jobs),
            "grants": len(self.grants),
            "redelivered": sum(count - 1 for count in by_job.values()),
            "pushed": sum(bool(grant.stream) for grant in self.grants),
            "effects": len(self.effects),
            "repeated effects": len(self.effects) - len({effect.id for effect in self.effects}),
            "letters": len(self.letters),
            **{f"{kind}s": kinds[kind] for kind in ("ack", "nack", "extend")},
            **{f"seqs skipped by {kind}s": skipped[kind] for kind in ("ack", "nack", "extend")},
            "unanswered calls": len(self.calls) - len(known),
        }

    # -- indexes ---------------------------------------------------------------------------

    def _index(self) -> Iterator[str]:
        self._began = [life.began_ms for life in self.lives]
        for before, after in itertools.pairwise(self.lives):
            assert before.ended_ms <= after.began_ms, "one life after the other"
        history = defaultdict(list)
        leases = Counter[str]()
        for grant in sorted(self.grants, key=lambda grant: (grant.claimed_ms, grant.deliveries)):
            history[grant.queue, grant.seq].append(grant)
            self._by_lease[grant.queue, grant.seq, grant.lease_id] = grant
            leases[grant.lease_id] += 1
        yield from (f"{lease} was given {n} times" for lease, n in leases.items() if n > 1)
        self._history = dict(history)
        self._claimed = {
            key: [grant.claimed_ms for grant in grants] for key, grants in history.items()
        }

    def _index_calls(self) -> Iterator[str]:
        uses = defaultdict(list)
        for call in self.calls:
            assert len(set(call.seqs)) == len(call.seqs), "an answer tells seqs, not which of two"
            skipped = set(call.skipped)
            if call.is_known and (
                call.done + len(call.skipped) != len(call.seqs) or not skipped <= set(call.seqs)
            ):
                yield f"{call} counts {call.done} of {len(call.seqs)} seqs"
            for index, seq in enumerate(call.seqs):
                is_done = call.is_known and seq not in skipped
                for grant in self._candidates(call, index):
                    use = _Use(call, is_done, call.lease_ids is not None)
                    uses[grant.lease_id].append(use)
        self._uses = dict(uses)

    def _candidates(self, call: Call, index: int) -> list[Grant]:
        """The leases that a call may mean by one of its seqs."""
        seq = call.seqs[index]
        if call.lease_ids is not None:
            found = self._by_lease.get((call.queue, seq, call.lease_ids[index]))
            return [] if found is None else [found]
        until = float("inf") if call.got_ms is None else call.got_ms
        return [
            grant
            for grant in self._history.get((call.queue, seq), ())
            if grant.node == call.node and grant.claimed_ms <= until
        ]

    # -- leases ----------------------------------------------------------------------------

    def _life(self, at_ms: float) -> int:
        """The number of the life at this time, or of the last one before it."""
        return bisect.bisect_right(self._began, at_ms) - 1

    def _crashes(self, first_ms: float, last_ms: float) -> Iterator[Life]:
        """The crashes that began in this time span."""
        for life in self.lives[max(0, self._life(first_ms)) :]:
            if life.stopped_ms > last_ms:
                break
            if not life.is_clean and life.ended_ms >= first_ms:
                yield life

    def _may_be_over(self, grant: Grant, at_ms: float, but: Call | None = None) -> bool:
        deadline_ms: float = grant.deadline_ms
        for use in self._uses.get(grant.lease_id, ()):
            call = use.call
            if call is but or call.sent_ms > at_ms + _TICK_MS:
                continue
            if call.kind == "ack" and not call.is_known:
                # A job that is delivered later was not acked.
                if grant is self._history[grant.queue, grant.seq][-1]:
                    return True
            elif call.kind != "extend":
                if use.is_done or not call.is_known:
                    return True
            elif use.is_done and call.got_ms is not None and call.got_ms <= at_ms:
                # A worker waits for each answer, so this is its newest lease.
                deadline_ms = call.sent_ms + call.value_ms
            elif use.is_done or not call.is_known:
                deadline_ms = min(deadline_ms, call.sent_ms + call.value_ms)
        if deadline_ms - _TICK_MS < at_ms:
            return True
        if grant.stream and self._stream_may_be_over(grant, at_ms):
            return True
        is_soft = not self.queues[grant.queue].is_durable
        return is_soft and any(True for _ in self._crashes(grant.claimed_ms, at_ms))

    def _stream_may_be_over(self, grant: Grant, at_ms: float) -> bool:
        if self.closed.get(grant.stream, float("inf")) <= at_ms + _TICK_MS:
            return True
        life = self.lives[self._life(grant.claimed_ms)]
        return life.is_clean and life.stopped_ms <= at_ms + _TICK_MS

    def _is_over(self, grant: Grant, at_ms: float, but: Call | None = None) -> bool:
        claimed = self._claimed[grant.queue, grant.seq]
        # Another worker's lease, granted later and well before this time.
        later = bisect.bisect_right(claimed, grant.claimed_ms)
        if later < len(claimed) and claimed[later] + _TICK_MS < at_ms:
            return True
        for use in self._uses.get(grant.lease_id, ()):
            call = use.call
            ends = call is not but and use.is_done and use.is_certain and call.kind != "extend"
            if ends and call.got_ms is not None and call.got_ms <= at_ms:
                return True
        is_soft = not self.queues[grant.queue].is_durable
        return is_soft and any(
            life.ended_ms <= at_ms for life in self._crashes(grant.claimed_ms, at_ms)
        )

    # -- deliveries ------------------------------------------------------------------------

    def _check_history(self, history: list[Grant]) -> Iterator[str]:
        """Check all deliveries of one job."""
        for grant in history:
            yield from self._check_grant(grant)
        for before, after in itertools.pairwise(history):
            crashes = list(self._crashes(before.claimed_ms, after.claimed_ms))
            is_durable = self.queues[after.queue].is_durable
            if after.deliveries <= before.deliveries and (is_durable or not crashes):
                yield f"deliveries went from {before} to {after}"
            if not self._may_be_over(before, after.claimed_ms):
                yield f"two leases at once: {before} and {after}"
            if is_durable or not crashes:
                yield from self._check_nack_delay(before, after)

    def _check_grant(self, grant: Grant) -> Iterator[str]:
        job = self.jobs.get(grant.id)
        if job is None or (job.queue, job.seq) != (grant.queue, grant.seq):
            yield f"{grant} is not the job enqueued: {job}"
            return
        if job.delay_ms and grant.claimed_ms < grant.ts + job.delay_ms:
            yield f"{grant} was given before its {job.delay_ms} ms were over"
        most = self.queues[grant.queue].max_deliveries
        if grant.deliveries < 1 or (most and grant.deliveries > most):
            yield f"{grant} was given more than {most} times"
        life = self.lives[self._life(grant.claimed_ms)]
        if not life.began_ms - _TICK_MS <= grant.claimed_ms <= life.ended_ms:
            yield f"{grant} was given while no server ran"

    def _check_nack_delay(self, before: Grant, after: Grant) -> Iterator[str]:
        for use in self._uses.get(before.lease_id, ()):
            call = use.call
            is_due = after.claimed_ms + _TICK_MS >= call.sent_ms + call.value_ms
            if call.kind == "nack" and use.is_done and use.is_certain and not is_due:
                yield f"{after} was given before the delay of {call} was over"

    # -- calls -----------------------------------------------------------------------------

    def _check_call(self, call: Call) -> Iterator[str]:
        """Check whether each seq was accepted or skipped as its lease requires."""
        if call.got_ms is None:
            return
        skipped = set(call.skipped)
        for index, seq in enumerate(call.seqs):
            grants = self._candidates(call, index)
            what = f"{call.kind} of {seq} in {call.queue} by {call.node} at {call.sent_ms:.1f}"
            if seq in skipped:
                for grant in grants:
                    began = grant.claimed_ms <= call.sent_ms
                    if began and not self._may_be_over(grant, call.got_ms, call):
                        yield f"{what} was skipped under a lease that holds: {grant}"
            elif not grants:
                yield f"{what} counts without a lease"
            elif all(self._is_over(grant, call.sent_ms, call) for grant in grants):
                yield f"{what} counts under a lease that is over: {grants[-1]}"

    def _check_effects(self) -> Iterator[str]:
        """Check the promise of the workers: an effect before each ack, under its lease."""
        done = {(effect.queue, effect.seq, effect.lease_id) for effect in self.effects}
        for key in done:
            if key not in self._by_lease:
                yield f"an effect without a lease: {key}"
        for call in self.calls:
            if call.kind != "ack" or call.lease_ids is None:
                continue
            for seq, lease_id in zip(call.seqs, call.lease_ids, strict=True):
                if (call.queue, seq, lease_id) not in done:
                    yield f"an ack without an effect: {call.queue} {seq} {lease_id}"

    # -- outcomes --------------------------------------------------------------------------

    def _check_outcomes(self) -> Iterator[str]:
        """Check that each job was acked once or is one dead letter; never both, never neither."""
        effects = {effect.id for effect in self.effects}
        letters = defaultdict(list)
        for letter in self.letters:
            letters[letter.id].append(letter)
            if letter.id not in self.jobs:
                yield f"{letter} is of no job"
        acked: dict[Key, list[Call]] = defaultdict(list)
        unknown: set[Key] = set()
        for call in self.calls:
            if call.kind == "ack":
                skipped = set(call.skipped)
                for seq in call.seqs:
                    if not call.is_known:
                        unknown.add((call.queue, seq))
                    elif seq not in skipped:
                        acked[call.queue, seq].append(call)
        for job in self.jobs.values():
            key = job.queue, job.seq
            yield from self._check_letters(job, letters[job.id])
            yield from self._check_acks(job, acked[key], bool(letters[job.id]))
            if letters[job.id]:
                continue
            if job.id not in effects:
                yield f"lost: nothing was done for {job}, and it is no dead letter"
            elif not acked[key] and key not in unknown:
                yield f"lost: {job} is gone, but nobody acked it"

    def _check_acks(self, job: Job, acks: list[Call], is_letter: bool) -> Iterator[str]:
        if len(acks) > 1:
            yield f"{job} was acked {len(acks)} times: {acks}"
        if acks and is_letter:
            yield f"{job} was acked and is a dead letter"
        for call in acks:
            # whether before or after the ack was decided: one of the two answers was wrong
            last_ms = max(
                (grant.claimed_ms for grant in self._candidates(call, call.seqs.index(job.seq))),
                default=0,
            )
            for grant in self._history.get((job.queue, job.seq), ()):
                if grant.claimed_ms > last_ms:
                    yield f"{job} was acked at {call.sent_ms:.1f} and given away after it: {grant}"

    def _check_letters(self, job: Job, letters: list[Letter]) -> Iterator[str]:
        if len(letters) > 1:
            yield f"{job} is {len(letters)} dead letters"
        for letter in letters:
            queue = self.queues[job.queue]
            if (letter.queue, letter.seq) != (job.queue, job.seq):
                yield f"{letter} is not from where {job} was"
            if not queue.max_deliveries or letter.deliveries != queue.max_deliveries:
                yield f"{letter} after {letter.deliveries} deliveries, not {queue.max_deliveries}"
            for grant in self._history.get((job.queue, job.seq), ()):
                if grant.claimed_ms > letter.ts:
                    yield f"{job} was given after it had become {letter}: {grant}"

    def _check_ends(self) -> Iterator[str]:
        letters = Counter(letter.queue for letter in self.letters)
        for end in self.ends:
            if end.count or end.ready or end.in_flight or end.delayed:
                yield f"the queue is not empty: {end}"
            if end.dead_lettered != letters[end.queue]:
                yield f"{end} counts other than its {letters[end.queue]} letters"
        if {end.queue for end in self.ends} != set(self.queues):
            yield "not every queue was looked at in the end"
