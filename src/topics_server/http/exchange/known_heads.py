"""Heads that were parsed before, with the direct calls for them.

A client sends the same head many times. So a request with a known head is not parsed: its body
begins after the head, and its length is known from the head. Many clients send head and body one
after the other: the connection waits a moment for the body. A head that may hold a key is stored
only as a keyed digest. One instance for each door. `http/connection` calls `serve` between two
requests, and `keep` with the bytes that the parser read.

One field of a head may count the requests of a client (`DirectCall.counter`). Such a head is stored
without the digits of that field, so that it is known with every number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

from topics_server.http.exchange.door import AnsweringConnection, DirectCall
from topics_server.runtime.clock import random_id
from topics_server.values.limits import KIB, MIB

# Larger heads are parsed each time.
_HEAD_BYTES_MAX: Final = KIB
# The most known heads, and the most memory for them and their calls; the oldest are forgotten. A
# client decides how many fields a head has, so the memory of a call is estimated: fixed, for each
# line of its head, and for each byte of it.
_HEADS_MAX: Final = 16_384
_MEMORY_MAX: Final = 32 * MIB
_CALL_BYTES: Final = 700
_LINE_BYTES: Final = 120
_COPIES: Final = 2
# When the table is full, one new head in this many takes a place: clients that use more heads than
# it holds, in turns, would otherwise replace each head before it comes again.
_REPLACED_EVERY: Final = 16
_END: Final = b"\r\n\r\n"
# A head that contains this word, in upper or lower case, may hold a key.
_OF_KEYS: Final = b"authorization"
# The most spellings of counters, such as `\r\nProducer-Seq: `; at the limit no other is stored.
_COUNTERS_MAX: Final = 4
# A head with a longer number is parsed, which also measures the head.
_DIGITS_MAX: Final = 16
# How long a known head waits for its body before it is parsed, seconds.
_BODY_AWAITED_S: Final = 0.01


class KnownHeads:
    """Direct calls by their heads, or by the digests of heads that may hold a key."""

    __slots__ = (
        "_by_digest",
        "_by_head",
        "_counters",
        "_forgotten",
        "_memory",
        "_passed_over",
        "_secret",
    )

    def __init__(self) -> None:
        self._by_head: OrderedDict[bytes, DirectCall] = OrderedDict()
        self._by_digest: OrderedDict[bytes, DirectCall] = OrderedDict()
        # The estimated memory of both, and how many were forgotten for others.
        self._memory = 0
        self._forgotten = 0
        # How many new heads came since the table was full for the first time.
        self._passed_over = 0
        # The bytes before the digits of a counter, as clients spell them.
        self._counters: tuple[bytes, ...] = ()
        self._secret = random_id(32).encode("ascii")

    def __len__(self) -> int:
        """How many heads are known."""
        return len(self._by_head) + len(self._by_digest)

    def serve(self, connection: AnsweringConnection, data: bytes) -> bool:
        """Serve `data` if it is exactly one request with a known head.

        Returns False, without any effect, if it is not. If `data` is a known head alone, the
        connection holds it back.
        """
        end = data.find(_END, 0, _HEAD_BYTES_MAX) + len(_END)
        head, number = data[:end], b""
        for counter in self._counters:
            at = head.find(counter) + len(counter)
            if at >= len(counter):
                number = head[at : head.find(b"\r", at)]
                if not number.isdigit() or len(number) > _DIGITS_MAX:
                    # Without a number, the head may look like one from which it was removed.
                    return False
                head = head[:at] + head[at + len(number) :]
                break
        call = self._by_head.get(head)
        if call is None:
            if not self._by_digest:
                return False
            call = self._by_digest.get(self._digest(head))
            if call is None:
                return False
        if len(data) == end + call.length:
            return call.serve(connection, data[end:], number)
        if len(data) == end:
            connection.await_body(data)
            return True
        return False

    def keep(self, data: bytes, length: int, call: DirectCall) -> None:
        """Keep the call of a request with a body of `length` bytes.

        `data`: the received bytes, which begin with the request. The call is kept only if `data` is
        exactly this request: then its first empty line is the end of its head. Once heads were
        forgotten for others, one in `_REPLACED_EVERY` is kept.
        """
        end = data.find(_END, 0, _HEAD_BYTES_MAX) + len(_END)
        if end >= len(_END) and len(data) == end + length and length == call.length:
            head = data[:end]
            if call.counter:
                head = self._without_number(head, call.counter)
                if not head:
                    return
            # Count only heads that can be kept: others that come in turns with them would take
            # each place, and use none.
            if self._forgotten:
                self._passed_over += 1
                if self._passed_over % _REPLACED_EVERY:
                    return
            if _OF_KEYS in head.lower():
                self._add(self._by_digest, self._digest(head), head, call)
            else:
                self._add(self._by_head, head, head, call)

    def _add(
        self, heads: OrderedDict[bytes, DirectCall], key: bytes, head: bytes, call: DirectCall
    ) -> None:
        """Add a call; forget the oldest ones if there are too many."""
        lines = head.count(b"\r\n")
        call.kept_bytes = _CALL_BYTES + _LINE_BYTES * lines + _COPIES * len(head)
        known = heads.pop(key, None)
        if known is not None:
            self._memory -= known.kept_bytes
        self._memory += call.kept_bytes
        while len(self) and (len(self) >= _HEADS_MAX or self._memory > _MEMORY_MAX):
            # Of the larger kind: many heads without a key do not displace the few with one.
            _, oldest = max(self._by_head, self._by_digest, key=len).popitem(last=False)
            self._memory -= oldest.kept_bytes
            self._forgotten += 1
        heads[key] = call
        if self._forgotten >= _HEADS_MAX and len(self._counters) >= _COUNTERS_MAX:
            # Other spellings of counters get a chance.
            self.clear()

    def _without_number(self, head: bytes, name: bytes) -> bytes:
        """The head without the digits of its counter; empty if the head is not to be kept."""
        lower = head.lower()
        at = lower.find(b"\r\n%b:" % name)
        # A second place with this name could be the field that the parser has read.
        if at < 0 or lower.count(name) != 1:
            return b""
        line_end = head.find(b"\r\n", at + 2)
        start = at + len(name) + 3
        start += len(head[start:line_end]) - len(head[start:line_end].lstrip(b" "))
        if not head[start:line_end].isdigit():
            return b""
        counter = head[at:start]
        if counter not in self._counters:
            if len(self._counters) >= _COUNTERS_MAX:
                return b""
            self._counters += (counter,)
        return head[:start] + head[line_end:]

    def _digest(self, head: bytes) -> bytes:
        return blake2b(head, digest_size=16, key=self._secret).digest()

    def clear(self) -> None:
        """Forget all heads: their calls may be out of date."""
        self._by_head.clear()
        self._by_digest.clear()
        self._counters = ()
        self._memory = self._forgotten = self._passed_over = 0


class EarlyHead:
    """A known head that a connection holds back; `parse` is called if its body does not come."""

    __slots__ = ("_end", "_head")

    def __init__(self, head: bytes, loop: Any, parse: Callable[[], None]) -> None:
        self._head = head
        self._end = loop.call_later(_BODY_AWAITED_S, parse)

    def take(self) -> bytes:
        """Stop waiting, and return the head."""
        self._end.cancel()
        return self._head
