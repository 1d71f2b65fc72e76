"""`traceparent`: what is valid in version 00 of the W3C recommendation, and what is ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.api.messages.trace_headers import checked_trace, trace_of
from topics_server.http.request_head import check_once

TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
IDS = b"4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"


@pytest.mark.parametrize(
    "sent",
    [
        TRACE,
        b"00-%b-00" % IDS,
        b"00-%b-ff" % IDS,
        b"00-" + 31 * b"0" + b"1-" + 15 * b"0" + b"1-00",
        b"00-" + 32 * b"f" + b"-" + 16 * b"f" + b"-09",
    ],
)
def test_a_valid_trace_is_itself(sent: bytes) -> None:
    assert trace_of({b"traceparent": sent}) == sent
    assert checked_trace(b" \t" + sent + b"  ") == sent


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b" ",
        TRACE.upper(),
        TRACE[:-1],
        TRACE[:-3],
        TRACE + b"0",
        TRACE + b"-00",
        TRACE + b"\n",
        TRACE + b" " * 100,
        b"01-%b-01" % IDS,
        b"ff-%b-01" % IDS,
        b"0-%b-01" % IDS,
        b"00-" + 32 * b"0" + b"-00f067aa0ba902b7-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-" + 16 * b"0" + b"-01",
        TRACE.replace(b"-", b"_"),
        TRACE.replace(b"4b", b"4g"),
        TRACE.replace(b"4b", b"\xc3\xa9"),
        b"%b, %b" % (TRACE, TRACE),
    ],
)
def test_any_other_value_is_ignored(sent: bytes) -> None:
    assert trace_of({b"traceparent": sent}) == b""


@given(st.binary(max_size=70))
def test_no_bytes_are_an_error(sent: bytes) -> None:
    assert checked_trace(sent) in (b"", sent.strip(b" \t"))


def test_without_the_header_there_is_no_trace() -> None:
    assert trace_of({}) == b""


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_header_that_stands_twice_counts_as_none(count: int) -> None:
    headers = [(b"host", b"x"), *count * [(b"traceparent", TRACE)]]
    fields = dict(headers)
    check_once(headers, fields)
    assert trace_of(fields) == (TRACE if count == 1 else b"")
    assert fields[b"host"] == b"x"
