"""The dispatcher's handling of readers' decisions; the tests of `broadcast` check its rules."""

from __future__ import annotations

import pytest

from topics_server.engine.subscribe import dispatcher


def test_a_failed_write_does_not_affect_the_others() -> None:
    written: list[bytes] = []

    def fail(wire: bytes) -> None:
        raise RuntimeError("the handler is closed")

    writes: dispatcher.Writes = [(written.append, b"1"), (fail, b"2"), (written.append, b"3")]
    with pytest.raises(RuntimeError):
        dispatcher._write(writes)
    assert written == [b"1", b"3"]
    assert not writes
