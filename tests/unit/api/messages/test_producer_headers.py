"""The producer headers: a request must have all three or none; their grammar, and their values in
an answer.
"""

from __future__ import annotations

import pytest

from topics_server.api.messages.producer_headers import EPOCH, ID, SEQ, receipt_lines, stamp_of
from topics_server.engine.answers import Appended, ProducerRepeat
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import PRODUCER_ID_CHARS_MAX, PRODUCER_NUMBER_MAX
from topics_server.values.model import ProducerStamp

MOST = b"%d" % PRODUCER_NUMBER_MAX


def asked(producer_id: bytes = b"p", epoch: bytes = b"0", seq: bytes = b"0") -> dict[bytes, bytes]:
    return {ID: producer_id, EPOCH: epoch, SEQ: seq}


def field_of(headers: dict[bytes, bytes]) -> object:
    with pytest.raises(TopicsError) as caught:
        stamp_of(headers)
    assert caught.value.code is Code.INVALID_REQUEST
    assert caught.value.detail is not None
    return caught.value.detail["field"]


def test_without_the_headers_there_is_no_producer() -> None:
    assert stamp_of({b"host": b"x"}) is None


@pytest.mark.parametrize("missing", [ID, EPOCH, SEQ])
def test_some_of_the_three_are_refused(missing: bytes) -> None:
    headers = asked()
    del headers[missing]
    assert str(field_of(headers)).lower().encode() == missing
    assert field_of({missing: b"1"}) in ("Producer-Id", "Producer-Epoch")


@pytest.mark.parametrize(
    ("sent", "number"),
    [(b"0", 0), (b"007", 7), (b" 5 ", 5), (MOST, PRODUCER_NUMBER_MAX), (b"0" * 20 + b"1", 1)],
)
def test_a_number_is_its_digits(sent: bytes, number: int) -> None:
    assert stamp_of(asked(epoch=sent)) == ProducerStamp("p", number, 0)
    assert stamp_of(asked(seq=sent)) == ProducerStamp("p", 0, number)


@pytest.mark.parametrize(
    "sent",
    [
        *(b"", b" ", b"-1", b"+1", b"1.0", b"1e3", b"0x1", b"1_0", b"\xb2", b"\xd9\xa1"),
        *(b"9" * 16, b"%d" % (PRODUCER_NUMBER_MAX + 1), b"0" * 33),
    ],
)
def test_anything_else_is_no_number(sent: bytes) -> None:
    assert field_of(asked(epoch=sent)) == "Producer-Epoch"
    assert field_of(asked(seq=sent)) == "Producer-Seq"


def test_an_id_is_text_of_1_to_256_characters() -> None:
    longest = "é" * PRODUCER_ID_CHARS_MAX
    assert stamp_of(asked(longest.encode())) == ProducerStamp(longest, 0, 0)
    for wrong in (b"", longest.encode() + b"e", b"\xff"):
        # A refused value is refused again: the cache stores nothing of it.
        assert [field_of(asked(wrong)) for _ in range(2)] == ["Producer-Id"] * 2


def test_an_answer_tells_the_request_it_took() -> None:
    done = Appended(5, 6, 6)
    told = receipt_lines(ProducerStamp("p", 3, 4), done)
    assert told == b"producer-epoch: 3\r\nproducer-seq: 4\r\n"


@pytest.mark.parametrize("is_last", [True, False])
def test_a_repeat_is_told_the_highest_and_of_that_its_seqs(is_last: bool) -> None:
    done = Appended(5, 6, 9, repeat=ProducerRepeat(3, 8, is_last))
    told = receipt_lines(ProducerStamp("p", 3, 4), done)
    seqs = b"topic-first-seq: 5\r\ntopic-last-seq: 6\r\n" if is_last else b""
    assert told == b"producer-epoch: 3\r\nproducer-seq: 8\r\n" + seqs
