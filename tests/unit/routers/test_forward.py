"""From a page of the source to copies: which records, in which order, and which losses are
reported.
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.engine.answers import Gap, Page, Piece
from topics_server.routers.forward import HOPS_MAX, copy_page
from topics_server.values.blocks import Block, make_block
from topics_server.values.entries import RouterStamp
from topics_server.values.model import LossReason, RouterDefinition, TagMatch

_TAGS = [None, "a", "a:1", "b"]
_NODES = [None, "n1"]
_HOPS = [0, 1, HOPS_MAX - 1, HOPS_MAX, 255]
_STAMP = RouterStamp("r", "s", 1)
_ROWS = st.lists(
    st.tuples(st.sampled_from(_TAGS), st.sampled_from(_NODES), st.sampled_from(_HOPS)),
    min_size=1,
    max_size=8,
)
_FILTERS = [None, TagMatch("a"), TagMatch("a", is_prefix=True), TagMatch("", is_prefix=True)]


def _block(first_seq: int, rows: list[tuple[str | None, str | None, int]]) -> Block:
    count = len(rows)
    return make_block(
        first_seq,
        array("q", [7] * count),
        [b"%d" % (first_seq + row) for row in range(count)],
        [b'{"m":%d}' % (first_seq + row) if row % 2 else b"" for row in range(count)],
        [tag for tag, _, _ in rows],
        [node for _, node, _ in rows],
        bytes(hops for _, _, hops in rows),
    )


def _page(pieces: list[Piece], last: int, gap: Gap | None = None) -> Page:
    return Page(pieces, last, last, 1, gap)


@given(
    blocks=st.lists(_ROWS, max_size=3),
    drawn=st.data(),
    match=st.sampled_from(_FILTERS),
    allow_cycle=st.booleans(),
    preserve=st.tuples(st.booleans(), st.booleans()),
    stamp=st.none() | st.just(_STAMP),
)
def test_copies_are_what_the_rule_says(
    blocks: list[list[tuple[str | None, str | None, int]]],
    drawn: st.DataObject,
    match: TagMatch | None,
    allow_cycle: bool,
    preserve: tuple[bool, bool],
    stamp: RouterStamp | None,
) -> None:
    pieces: list[Piece] = []
    expected: list[tuple[int, str | None, str | None, int]] = []
    seq = 3
    known = drawn.draw(st.sets(st.integers(3, 20)))
    for rows in blocks:
        live = drawn.draw(st.lists(st.integers(0, len(rows) - 1), unique=True).map(sorted))
        pieces.append(Piece(_block(seq, rows), live))
        for row in live:
            tag, node, hops = rows[row]
            is_wanted = match is None or match.matches(tag)
            if is_wanted and not (allow_cycle and hops >= HOPS_MAX) and seq + row not in known:
                kept = tag if preserve[1] else None, node if preserve[0] else None
                expected.append((seq + row, *kept, min(hops + 1, 255)))
        seq += len(rows) + drawn.draw(st.integers(0, 2))
    definition = RouterDefinition("s", "d", *preserve, filter=match, allow_cycle=allow_cycle)
    copies = copy_page(_page(pieces, seq), definition, stamp, known)
    runs = zip(copies.firsts, copies.lasts, strict=True)
    seqs = [at for first, last in runs for at in range(first, last + 1)]
    decoded = copies.decoded
    gone = copies.hops or b"\x01" * len(seqs)
    found = list(zip(seqs, decoded.tags, decoded.nodes, gone, strict=True))
    assert found == expected
    assert [bytes(data) for data in decoded.datas] == [b"%d" % at for at in seqs]
    assert bytes(decoded.hops) == gone
    assert copies.is_empty == (not expected)
    assert copies.cursor_seq == seq
    # Neighbouring records are joined: no run begins right after the one before it.
    assert all(
        after > last + 1 for last, after in zip(copies.lasts, copies.firsts[1:], strict=False)
    )


@pytest.mark.parametrize(
    ("reason", "allow_cycle", "lost"),
    [
        (LossReason.CAP, False, 5),
        (LossReason.CAP, True, 5),
        (LossReason.TTL, True, 5),
        (LossReason.DAMAGED, True, 5),
        (LossReason.RESTART, False, 5),
        (LossReason.SOURCE_TRIM, False, 5),
        # The record would circulate for ever.
        (LossReason.SOURCE_TRIM, True, 0),
        (LossReason.RECREATED, False, 0),
    ],
)
def test_what_the_source_lost_is_told(reason: LossReason, allow_cycle: bool, lost: int) -> None:
    page = _page([], 9, Gap(5, 9, reason, 5))
    copies = copy_page(page, RouterDefinition("s", "d", allow_cycle=allow_cycle), None, ())
    assert (copies.lost, copies.is_empty, copies.cursor_seq) == (lost, not lost, 9)
