"""The protocol of each queue: ours, redis lists, redis streams, JetStream. Pure: bytes and values.

A wire builds requests and decides whether an answer is complete; `workers` owns the sockets. All
wires do the same work in as few round trips as their protocol allows. Each job is leased: it comes
back when its worker dies. Other promises differ; docs/PERFORMANCE.md lists them.

- Redis lists: jobs in a list. A claim is one script: it returns expired jobs to the list, takes
  jobs off the list and stores each under a new tag in a hash, with its deadline in a sorted set. An
  ack removes tag and deadline. For a waiting worker, BLMOVE moves the job, and the worker stores it
  afterwards.
- Redis streams: one consumer group; an ack is XACK and XDEL, because the stream would otherwise
  keep every job.
- JetStream: a stream of work-queue retention, one pull consumer from which all workers fetch, and
  an explicit ack for each job. An ack has no answer: a PING after a worker's acks shows that the
  server read them, and the phase ends when the stream reports that it is empty.

`postgres_queue` has the wires of PostgreSQL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import sha1
from typing import Protocol

from benchmarks.clients.requests import data_text, http_request
from benchmarks.servers.peers import command

LEASE_MS = 600_000
QUEUE = "jobs"
_NUMBER = re.compile(rb'"id":(\d+),"tag"')


class WireError(Exception):
    """An answer with which the benchmark cannot continue; the message shows its beginning."""


def payload(number: int) -> bytes:
    """The job of this number, the same on every side."""
    return data_text(number, f"t-{number % 1000:03d}")


def numbers(answer: bytes) -> list[int]:
    """The numbers of the jobs in an answer."""
    return [int(found) for found in _NUMBER.findall(answer)]


class Wire(Protocol):
    """One side. `worker` is a connection's number; `count` is the number of jobs of a request."""

    # Whether the server pushes jobs after `wait` was sent.
    is_stream: bool

    def greeting(self, worker: int) -> bytes:
        """The first bytes of a connection; empty if there is no greeting."""
        ...

    def greeted(self, data: bytes) -> bool:
        """Whether the answer to the greeting is complete."""
        ...

    def setup(self) -> list[bytes]:
        """Requests that make the queue, in order; `is_set_up` recognises the answer to each."""
        ...

    def is_set_up(self, data: bytes) -> bool:
        """Whether the answer to one of the requests of `setup` is complete."""
        ...

    def enqueue(self, worker: int, jobs: Sequence[bytes]) -> bytes:
        """Add jobs."""
        ...

    def enqueued(self, data: bytes, count: int) -> bool:
        """Whether all jobs are added."""
        ...

    def claim(self, worker: int, count: int, now_ms: int) -> bytes:
        """Lease jobs."""
        ...

    def claimed(self, data: bytes, count: int) -> bool:
        """Whether the answer is complete; fewer jobs than requested are an error."""
        ...

    def ack(self, worker: int, answer: bytes) -> bytes:
        """Complete the jobs of a claim's answer."""
        ...

    def acked(self, data: bytes, count: int) -> bool:
        """Whether all jobs are completed; fewer are an error."""
        ...

    def left(self, worker: int) -> bytes:
        """Request the number of jobs, waiting or leased."""
        ...

    def left_count(self, data: bytes) -> int | None:
        """The number of jobs; None while the answer is incomplete."""
        ...

    def wait(self, worker: int) -> bytes:
        """Wait for one job."""
        ...

    def waited(self, data: bytes) -> bool:
        """Whether the job, or the notice of a job, has arrived."""
        ...

    def fetch(self, worker: int) -> bytes:
        """Claim a job that was only announced; empty if the job itself arrived."""
        ...

    def hold(self, answer: bytes, now_ms: int) -> bytes:
        """The request that leases the received job; empty if the delivery leases it."""
        ...


def http_body(data: bytes) -> bytes | None:
    """The body of a complete HTTP answer; None if the answer is incomplete."""
    head, mark, body = data.partition(b"\r\n\r\n")
    if not mark:
        return None
    at = head.find(b"content-length: ")
    if at < 0 or head[9:10] != b"2":
        raise WireError(data[:400].decode("latin-1"))
    end = head.find(b"\r\n", at)
    size = int(head[at + 16 : end if end > 0 else len(head)])
    return body if len(body) >= size else None


class Ours:
    """Our queue, class disk: every ack carries the claim's `lease_ids`."""

    is_stream = False
    _LEASE = re.compile(rb'"\$seq":(\d+),"lease_id":"(lease_[0-9a-f]+)"')
    _ACKED = re.compile(rb'"acked":(\d+)')
    _HELD = re.compile(rb'"ready":(\d+),"in_flight":(\d+)')
    _PATH = f"/v0/topics/{QUEUE}"

    def greeting(self, worker: int) -> bytes:
        return b""

    def greeted(self, data: bytes) -> bool:
        return True

    def setup(self) -> list[bytes]:
        config = b'{"type":"queue","durability":"disk"}'
        return [http_request("PUT", self._PATH, config)]

    def is_set_up(self, data: bytes) -> bool:
        return http_body(data) is not None

    def enqueue(self, worker: int, jobs: Sequence[bytes]) -> bytes:
        records = b",".join(b'{"data":%b}' % job for job in jobs)
        return http_request("POST", self._PATH, b'{"records":[%b]}' % records)

    def enqueued(self, data: bytes, count: int) -> bool:
        return http_body(data) is not None

    def claim(self, worker: int, count: int, now_ms: int) -> bytes:
        body = b'{"node":"w-%d","max":%d,"lease_ms":%d}' % (worker, count, LEASE_MS)
        return http_request("POST", f"{self._PATH}/claim", body)

    def claimed(self, data: bytes, count: int) -> bool:
        body = http_body(data)
        if body is not None and b'"count":%d,' % count not in body:
            raise WireError(f"{count} jobs asked for: {body[-200:]!r}")
        return body is not None

    def ack(self, worker: int, answer: bytes) -> bytes:
        body = b'{"node":"w-%d",%b}' % (worker, self._leases(answer))
        return http_request("POST", f"{self._PATH}/ack", body)

    def ack_and_claim(self, worker: int, answer: bytes, count: int) -> bytes:
        """Complete the jobs of an answer and lease the next ones, in one request."""
        body = b'{"node":"w-%d","max":%d,"lease_ms":%d,"ack":{%b}}' % (
            worker,
            count,
            LEASE_MS,
            self._leases(answer),
        )
        return http_request("POST", f"{self._PATH}/claim", body)

    def _leases(self, answer: bytes) -> bytes:
        found = self._LEASE.findall(answer)
        seqs = b",".join(seq for seq, _ in found)
        fences = b",".join(b'"%b"' % fence for _, fence in found)
        return b'"seqs":[%b],"lease_ids":[%b]' % (seqs, fences)

    def acked(self, data: bytes, count: int) -> bool:
        body = http_body(data)
        if body is not None:
            found = self._ACKED.search(body)
            if found is None or int(found.group(1)) != count:
                raise WireError(f"{count} jobs acked: {body[:200]!r}")
        return body is not None

    def left(self, worker: int) -> bytes:
        return http_request("GET", self._PATH)

    def left_count(self, data: bytes) -> int | None:
        body = http_body(data)
        if body is None:
            return None
        queue = json.loads(body)["queue"]
        return int(queue["ready"]) + int(queue["in_flight"])

    def wait(self, worker: int) -> bytes:
        body = b'{"node":"w-%d","max":1,"lease_ms":%d,"wait_ms":30000}' % (worker, LEASE_MS)
        return http_request("POST", f"{self._PATH}/claim", body)

    def waited(self, data: bytes) -> bool:
        return self.claimed(data, 1)

    def fetch(self, worker: int) -> bytes:
        return b""

    def hold(self, answer: bytes, now_ms: int) -> bytes:
        return b""


class OursPushed(Ours):
    """Our queue over its push stream, which each worker opens once."""

    is_stream = True

    def wait(self, worker: int) -> bytes:
        query = f"node=w-{worker}&max=8&lease_ms={LEASE_MS}"
        head = f"GET {self._PATH}/work?{query} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        return f"{head}accept: text/event-stream\r\n\r\n".encode()

    def waited(self, data: bytes) -> bool:
        at = data.find(b"event: job")
        return at >= 0 and data.find(b"\n\n", at) > 0


class Resp:
    """The part that both redis sides share."""

    is_stream = False

    def greeting(self, worker: int) -> bytes:
        return b""

    def greeted(self, data: bytes) -> bool:
        return True

    def is_set_up(self, data: bytes) -> bool:
        return lines(data, 1)

    def fetch(self, worker: int) -> bytes:
        return b""


def lines(data: bytes, count: int) -> bool:
    """Whether a redis answer has this number of lines. Raises if the answer is an error."""
    if data.startswith(b"-") or b"\r\n-" in data:
        raise WireError(data[:400].decode("latin-1"))
    return data.count(b"\r\n") >= count


def total(data: bytes, replies: int) -> int | None:
    """The sum of this number of integer replies; None while they are incomplete."""
    if not lines(data, replies):
        return None
    return sum(int(line[1:]) for line in data.split(b"\r\n")[:replies])


_CLAIM = b"""
local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[1], 'LIMIT', 0, ARGV[3])
if #expired > 0 then
  redis.call('RPUSH', KEYS[1], unpack(redis.call('HMGET', KEYS[3], unpack(expired))))
  redis.call('HDEL', KEYS[3], unpack(expired))
  redis.call('ZREM', KEYS[2], unpack(expired))
end
local jobs = redis.call('RPOP', KEYS[1], ARGV[3])
if not jobs then return {} end
local last = redis.call('INCRBY', KEYS[4], #jobs)
local deadlines, held = {}, {}
for i, job in ipairs(jobs) do
  local tag = string.format('%d', last - #jobs + i)
  deadlines[2 * i - 1], deadlines[2 * i] = ARGV[2], tag
  held[2 * i - 1], held[2 * i] = tag, job
end
redis.call('ZADD', KEYS[2], unpack(deadlines))
redis.call('HSET', KEYS[3], unpack(held))
return held
"""

_HOLD = b"""
redis.call('LREM', KEYS[1], 1, ARGV[2])
local tag = string.format('%d', redis.call('INCR', KEYS[4]))
redis.call('ZADD', KEYS[2], ARGV[1], tag)
redis.call('HSET', KEYS[3], tag, ARGV[2])
return {tag, ARGV[2]}
"""

_ACK = b"""
redis.call('ZREM', KEYS[1], unpack(ARGV))
return redis.call('HDEL', KEYS[2], unpack(ARGV))
"""


def script(text: bytes, keys: Sequence[bytes], *arguments: bytes) -> bytes:
    """The request that runs a loaded script."""
    name = sha1(text, usedforsecurity=False).hexdigest().encode()
    return command(b"EVALSHA", name, b"%d" % len(keys), *keys, *arguments)


class RedisList(Resp):
    """The reliable-queue pattern of redis with emulated leases."""

    _KEYS = (b"ready", b"deadlines", b"held", b"tags")

    def setup(self) -> list[bytes]:
        # Each answer is one bulk string of two lines.
        return [command(b"SCRIPT", b"LOAD", text) for text in (_CLAIM, _HOLD, _ACK)]

    def is_set_up(self, data: bytes) -> bool:
        return lines(data, 2)

    def enqueue(self, worker: int, jobs: Sequence[bytes]) -> bytes:
        return command(b"LPUSH", b"ready", *jobs)

    def enqueued(self, data: bytes, count: int) -> bool:
        return lines(data, 1)

    def claim(self, worker: int, count: int, now_ms: int) -> bytes:
        deadline = b"%d" % (now_ms + LEASE_MS)
        return script(_CLAIM, self._KEYS, b"%d" % now_ms, deadline, b"%d" % count)

    def claimed(self, data: bytes, count: int) -> bool:
        if not lines(data, 1):
            return False
        if not data.startswith(b"*%d\r\n" % (2 * count)):
            raise WireError(f"{count} jobs asked for: {data[:200]!r}")
        return lines(data, 1 + 4 * count)

    def ack(self, worker: int, answer: bytes) -> bytes:
        return script(_ACK, self._KEYS[1:3], *answer.split(b"\r\n")[2::4])

    def acked(self, data: bytes, count: int) -> bool:
        found = total(data, 1)
        if found not in (None, count):
            raise WireError(f"{count} jobs acked: {data[:200]!r}")
        return found is not None

    def left(self, worker: int) -> bytes:
        return command(b"LLEN", b"ready") + command(b"HLEN", b"held") + command(b"LLEN", b"taken")

    def left_count(self, data: bytes) -> int | None:
        return total(data, 3)

    def wait(self, worker: int) -> bytes:
        return command(b"BLMOVE", b"ready", b"taken", b"RIGHT", b"LEFT", b"0")

    def waited(self, data: bytes) -> bool:
        return lines(data, 2)

    def hold(self, answer: bytes, now_ms: int) -> bytes:
        keys = (b"taken", *self._KEYS[1:])
        return script(_HOLD, keys, b"%d" % (now_ms + LEASE_MS), answer.split(b"\r\n")[1])


class RedisStream(Resp):
    """A redis stream with a consumer group; the payload is one field."""

    _STREAM, _GROUP = b"jobs", b"workers"

    def setup(self) -> list[bytes]:
        return [command(b"XGROUP", b"CREATE", self._STREAM, self._GROUP, b"$", b"MKSTREAM")]

    def enqueue(self, worker: int, jobs: Sequence[bytes]) -> bytes:
        return b"".join(command(b"XADD", self._STREAM, b"*", b"d", job) for job in jobs)

    def enqueued(self, data: bytes, count: int) -> bool:
        return lines(data, 2 * count)

    def _read(self, worker: int, *options: bytes) -> bytes:
        group = (b"XREADGROUP", b"GROUP", self._GROUP, b"w-%d" % worker)
        return command(*group, *options, b"STREAMS", self._STREAM, b">")

    def claim(self, worker: int, count: int, now_ms: int) -> bytes:
        return self._read(worker, b"COUNT", b"%d" % count)

    def claimed(self, data: bytes, count: int) -> bool:
        # One stream with one name, then for each entry: pair, id, pair, name and value of the
        # field.
        if data.startswith(b"*-1\r\n"):
            raise WireError(f"{count} jobs asked for, none there")
        if not lines(data, 5 + 8 * count):
            return False
        if data.split(b"\r\n", 5)[4] != b"*%d" % count:
            raise WireError(f"{count} jobs asked for: {data[:200]!r}")
        return True

    def ack(self, worker: int, answer: bytes) -> bytes:
        ids = answer.split(b"\r\n")[7::8]
        return command(b"XACK", self._STREAM, self._GROUP, *ids) + command(
            b"XDEL", self._STREAM, *ids
        )

    def acked(self, data: bytes, count: int) -> bool:
        found = total(data, 2)
        if found not in (None, 2 * count):
            raise WireError(f"{count} jobs acked: {data[:200]!r}")
        return found is not None

    def left(self, worker: int) -> bytes:
        return command(b"XLEN", self._STREAM)

    def left_count(self, data: bytes) -> int | None:
        return total(data, 1)

    def wait(self, worker: int) -> bytes:
        return self._read(worker, b"COUNT", b"1", b"BLOCK", b"0")

    def waited(self, data: bytes) -> bool:
        return self.claimed(data, 1)

    def hold(self, answer: bytes, now_ms: int) -> bytes:
        return b""


class JetStream:
    """A JetStream stream of work-queue retention and its pull consumer."""

    is_stream = False
    _ACK_TO = re.compile(rb" (\$JS\.ACK\.\S+) \d+\r\n")
    _MESSAGES = re.compile(rb'"state":\{"messages":(\d+)')
    _NEXT = b"$JS.API.CONSUMER.MSG.NEXT.JOBS.workers"
    # The PING that the server sends two seconds after a client connected.
    _NOISE = b"PING\r\n"

    def greeting(self, worker: int) -> bytes:
        hello = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
        return hello + b"SUB _INBOX.%d 1\r\nPING\r\n" % worker

    def greeted(self, data: bytes) -> bool:
        return data.endswith(b"PONG\r\n")

    @staticmethod
    def _ask(worker: int, subject: bytes, body: bytes) -> bytes:
        return b"PUB %b _INBOX.%d %d\r\n%b\r\n" % (subject, worker, len(body), body)

    def setup(self) -> list[bytes]:
        stream = {"name": "JOBS", "subjects": [QUEUE], "retention": "workqueue"}
        stream |= {"storage": "file", "discard": "old"}
        consumer = {
            "durable_name": "workers",
            "ack_policy": "explicit",
            "ack_wait": LEASE_MS * 1_000_000,
            "max_ack_pending": -1,  # the default limit is 1,000 leased jobs
        }
        made = {"stream_name": "JOBS", "config": consumer}
        return [
            self._ask(0, b"$JS.API.STREAM.CREATE.JOBS", json.dumps(stream).encode()),
            self._ask(
                0, b"$JS.API.CONSUMER.DURABLE.CREATE.JOBS.workers", json.dumps(made).encode()
            ),
        ]

    def is_set_up(self, data: bytes) -> bool:
        return self._answers(data, 1)

    def _answers(self, data: bytes, count: int) -> bool:
        """Whether this number of messages of two lines arrived, without an error among them."""
        if b'"error":{' in data or b"HMSG " in data or b"-ERR" in data:
            raise WireError(data[:400].decode("latin-1"))
        if self._NOISE in data:
            data = data.replace(self._NOISE, b"")
        return data.count(b"\r\n") >= 2 * count

    def enqueue(self, worker: int, jobs: Sequence[bytes]) -> bytes:
        return b"".join(self._ask(worker, QUEUE.encode(), job) for job in jobs)

    def enqueued(self, data: bytes, count: int) -> bool:
        return self._answers(data, count)

    def claim(self, worker: int, count: int, now_ms: int) -> bytes:
        body = b'{"batch":%d,"expires":30000000000}' % count
        return self._ask(worker, self._NEXT, body)

    def claimed(self, data: bytes, count: int) -> bool:
        return self._answers(data, count)

    def ack(self, worker: int, answer: bytes) -> bytes:
        subjects = self._ACK_TO.findall(answer)
        return b"".join(b"PUB %b 4\r\n+ACK\r\n" % subject for subject in subjects) + b"PING\r\n"

    def acked(self, data: bytes, count: int) -> bool:
        return b"PONG\r\n" in data

    def left(self, worker: int) -> bytes:
        return self._ask(worker, b"$JS.API.STREAM.INFO.JOBS", b"")

    def left_count(self, data: bytes) -> int | None:
        if not self._answers(data, 1):
            return None
        found = self._MESSAGES.search(data)
        if found is None:
            raise WireError(data[:400].decode("latin-1"))
        return int(found.group(1))

    def wait(self, worker: int) -> bytes:
        return self.claim(worker, 1, 0)

    def waited(self, data: bytes) -> bool:
        return self.claimed(data, 1)

    def fetch(self, worker: int) -> bytes:
        return b""

    def hold(self, answer: bytes, now_ms: int) -> bytes:
        return b""


WIRES: dict[str, Wire] = {
    "ours": Ours(),
    "ours, pushed": OursPushed(),
    "redis list": RedisList(),
    "redis stream": RedisStream(),
    "JetStream": JetStream(),
}
