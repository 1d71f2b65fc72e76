"""Frames: every kind to its golden bytes and back, and refused contents of a valid group."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.archive.known import KnownBuilder
from topics_server.values.entries import (
    LEASES_ID,
    ROUTERS_ID,
    SESSIONS_ID,
    ConsumerDeleted,
    ConsumerMoved,
    CursorAt,
    CursorMoved,
    Entry,
    Floor,
    FloorMoved,
    HeadReserved,
    LeasesExtended,
    LeasesGranted,
    LeasesReleased,
    ProducerMoved,
    RecordsAppended,
    RecordsDeleted,
    RouterDeleted,
    RouterPage,
    RouterPut,
    RouterStamp,
    SessionMoved,
    SessionOpened,
    SessionOptions,
    SessionsClosed,
    Source,
    StreamChanged,
    TopicDropped,
    TopicPut,
    ViewDeleted,
    ViewPut,
)
from topics_server.values.errors import Corrupt
from topics_server.values.limits import FRAME_BYTES_MAX, PRODUCER_NUMBER_MAX
from topics_server.values.model import (
    Ancestor,
    ConsumerHold,
    Discard,
    Durability,
    Guarantee,
    LossReason,
    OnDelete,
    ProducerStamp,
    RouterDefinition,
    StreamFacts,
    StreamStep,
    TagMatch,
    TopicConfig,
    TopicType,
    ViewDefinition,
)
from topics_server.wal.format.frames import (
    FRAME_HEADER_BYTES,
    Kind,
    Opening,
    RawFrame,
    decode_frames,
    encode_entry,
    encode_opening,
    raw_frames,
)

VECTORS: Final = Path(__file__).parents[3] / "vectors" / "wal"
TS: Final = 1_700_000_000_123

PUT: Final = TopicPut(
    topic_id=7,
    name="orders",
    epoch=2,
    config=TopicConfig(
        type=TopicType.QUEUE,
        ttl_ms=60_000,
        cap_records=10,
        cap_bytes=4096,
        discard=Discard.REJECT,
        durability=Durability.FSYNC,
        priority=5,
        auto_priority=False,
        dead_letter="orders-dead",
        max_deliveries=3,
    ),
    ts=TS,
    head_seq=41,
    created=False,
    floor=Floor(12, LossReason.MIXED),
)
WID: Final = "wid_AAECAwQFBgcICQoLDA0ODw"
OPTIONS: Final = SessionOptions(["u1", "u2"], 256, 262_144, 15_000, 6, False)
AT: Final = [CursorAt("orders", 7, 2, 41), CursorAt("payments", 9, 1, 0)]
BODY: Final = '{"records":[{"data":{"a":1.0},"tag":"x"},{"data":"é"}]}'.encode()

STAMP: Final = ProducerStamp("billing-1", 3, 7)
TRACE: Final = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
FACTS: Final = StreamFacts(
    "chats/1",
    "text/plain",
    ttl_s=60,
    used_ms=TS,
    last_seq="a",
    ancestors=(Ancestor("chats/0", 5, 12),),
    fork_at=(12, 3),
)

GOLDEN: Final[dict[str, tuple[int, Entry]]] = {
    "topic_put": (3, PUT),
    "topic_dropped": (4, TopicDropped(7, "orders", TS)),
    "records_appended": (5, RecordsAppended(7, 42, 2, TS, BODY)),
    "records_appended_extra": (
        6,
        RecordsAppended(7, 44, 2, TS, BODY, "key-1", PUT, Floor(40, LossReason.CAP), 1),
    ),
    "records_appended_source": (
        6,
        RecordsAppended(9, 44, 2, TS, BODY, source=Source(7, [12, 2**62])),
    ),
    "records_appended_redrive": (
        6,
        RecordsAppended(7, 44, 2, TS, BODY, None, PUT, source=Source(9, [1, 3], is_redrive=True)),
    ),
    "records_appended_delayed": (
        6,
        RecordsAppended(7, 44, 1, TS, b'{"records":[{"data":1,"delay_ms":500}]}', grammar=2),
    ),
    "records_deleted": (
        7,
        RecordsDeleted(7, TS, struct.pack("<3Q", 1, 5, 9), struct.pack("<3Q", 2, 5, 12)),
    ),
    "floor_moved": (8, FloorMoved(7, TS, Floor(41, LossReason.TTL))),
    "head_reserved": (2**63, HeadReserved(7, 65_577)),
    "session_opened": (9, SessionOpened(WID, TS, OPTIONS, AT)),
    "session_opened_owned": (
        9,
        SessionOpened(WID, TS, OPTIONS, AT, "3c0a9f9d0c5e4c1f8a2b7d6e5f403122"),
    ),
    "session_opened_filtered": (
        9,
        SessionOpened(WID, TS, OPTIONS, AT, filter='["Not", "sent"]'),
    ),
    "session_opened_growing": (
        9,
        SessionOpened(WID, TS, OPTIONS, AT, prefixes=("orders.", ""), acks={"jobs": "billing"}),
    ),
    "session_moved": (10, SessionMoved(WID, TS, True, AT[:1])),
    "sessions_closed": (11, SessionsClosed([WID, "wid_other"], TS)),
    "leases_granted": (
        12,
        LeasesGranted(7, "worker-1", TS, TS + 30_000, 5, [(41, 2**64 - 1), (44, 2**64 - 2)]),
    ),
    "leases_released": (13, LeasesReleased(7, TS, [(41, TS), (44, TS + 5_000)])),
    "leases_released_error": (
        13,
        LeasesReleased(7, TS, [(41, TS)], error='no "such" file'),
    ),
    "leases_extended": (14, LeasesExtended(7, TS, TS + 60_000, [41, 44])),
    "records_appended_bare": (
        15,
        RecordsAppended(9, 44, 4, TS, b"", page=RouterPage(3, 7, 50, [41, 47], [42, 47], lost=5)),
    ),
    "records_appended_routed": (
        16,
        RecordsAppended(
            9,
            48,
            2,
            TS,
            BODY,
            floor=Floor(40, LossReason.CAP),
            page=RouterPage(
                3,
                7,
                2**62,
                [51],
                [52],
                preserve_node=False,
                preserve_tag=False,
                stamp=RouterStamp("orders->audit", "orders", 2),
                hops=b"\x02\x01",
            ),
        ),
    ),
    "cursor_moved": (17, CursorMoved(9, 3, 2**62)),
    "router_put": (
        18,
        RouterPut(
            3,
            "orders->audit",
            TS,
            RouterDefinition(
                "orders",
                "audit",
                preserve_node=False,
                filter=TagMatch("public:", is_prefix=True),
                guarantee=Guarantee.EXACTLY_ONCE,
            ),
            7,
            9,
            41,
            44,
        ),
    ),
    "router_deleted": (19, RouterDeleted(3, "orders->audit", TS)),
    "records_appended_produced": (
        20,
        RecordsAppended(
            9, 50, 2, TS, BODY, "key-1", producer=ProducerStamp("billing-1", 3, 2**53 - 1)
        ),
    ),
    "producer_moved": (21, ProducerMoved(9, TS, ProducerStamp("billing-1", 4, 0), 44, 2)),
    "topic_put_stream": (22, TopicPut(7, "ds:0a", 1, TopicConfig(), TS, stream=FACTS)),
    "stream_changed": (
        23,
        StreamChanged(7, TS, msgspec.structs.replace(FACTS, is_closed=True), STAMP, 45),
    ),
    "records_appended_bytes": (24, RecordsAppended(7, 44, 1, TS, b"image/png\n\x89P\n", grammar=3)),
    "records_appended_messages": (
        25,
        RecordsAppended(
            7, 44, 2, TS, b'[1, {"a":2}]', grammar=4, producer=STAMP, step=StreamStep("b", True)
        ),
    ),
    "records_appended_keyed": (
        31,
        RecordsAppended(7, 44, 1, TS, b'["batch",[1]]\n' + BODY, grammar=6),
    ),
    "records_appended_columns": (
        26,
        RecordsAppended(
            9,
            44,
            1,
            TS,
            msgspec.msgpack.encode(
                ([b"\x89P"], [b' {"$content_type":"image/png"}'], ["t"], [None])
            ),
            grammar=5,
            page=RouterPage(3, 7, 50, [41], [41]),
        ),
    ),
    "records_appended_traced": (
        32,
        RecordsAppended(7, 44, 2, TS, BODY, "key-1", grammar=1, producer=STAMP, trace=TRACE),
    ),
    "records_appended_traced_columns": (
        33,
        RecordsAppended(
            9,
            44,
            2,
            TS,
            msgspec.msgpack.encode(
                (
                    [b"\x89P", b"1"],
                    [b"\t" + TRACE + b' {"$content_type":"image/png"}', b"\t" + TRACE],
                    ["t", None],
                    [None, "n"],
                )
            ),
            grammar=7,
            page=RouterPage(3, 7, 50, [41], [42]),
        ),
    ),
}

DEFINITION: Final = ViewDefinition(
    schema=["CREATE TABLE t (a)"],
    apply=["INSERT INTO t VALUES (:seq)"],
    queries={"all": "SELECT a FROM t"},
    shortcut={"count_by_tag": True},
    on_delete=OnDelete.REBUILD,
)
GOLDEN["view_put"] = (12, ViewPut(3, "orders", "by-tag", TS, DEFINITION))
GOLDEN["view_deleted"] = (13, ViewDeleted(3, "orders", "by-tag", TS))
GOLDEN["consumer_moved"] = (14, ConsumerMoved(7, TS, "billing", 41))
GOLDEN["consumer_moved_hold"] = (
    14,
    ConsumerMoved(7, TS, "billing", 41, ConsumerHold(100_000, 2**30)),
)
GOLDEN["consumer_moved_free"] = (14, ConsumerMoved(7, TS, "billing", 41, None))
GOLDEN["consumer_deleted"] = (15, ConsumerDeleted(7, TS, "billing"))


def decode_one(data: bytes) -> tuple[int, Entry]:
    opening, entries = decode_frames(data, 0, len(data), 1, 64)
    assert opening is None
    return entries[0]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frame_decodes_and_encodes_to_the_same_bytes(name: str) -> None:
    data = (VECTORS / f"{name}.frame").read_bytes()
    assert decode_one(data) == GOLDEN[name]
    assert b"".join(encode_entry(*GOLDEN[name])) == data


def test_golden_opening() -> None:
    data = (VECTORS / "opening.frame").read_bytes()
    opening = Opening(previous_number=3, previous_end=4096, previous_lsn=99)
    assert encode_opening(opening) == data
    assert decode_frames(data, 0, len(data), 1, 64) == (opening, [])


@pytest.mark.parametrize("name", GOLDEN)
def test_a_raw_frame_tells_what_its_entry_tells(name: str) -> None:
    """A raw frame has its own bytes, and the seqs, ids and epochs that a new history must not use
    again.
    """
    data = (VECTORS / f"{name}.frame").read_bytes()
    lsn, entry = GOLDEN[name]
    (frame,) = raw_frames(data, 0, len(data), 1, 64)
    assert (frame.lsn, frame.content) == (lsn, data)
    decoded, raw = KnownBuilder(), KnownBuilder()
    decoded.note_entry(entry)
    raw.note_frame(frame)
    assert raw.result() == decoded.result()
    creation = entry.creation if isinstance(entry, RecordsAppended) else entry
    assert frame.creation == (creation if isinstance(creation, TopicPut) else None)


def test_raw_frames_are_those_behind_an_opening() -> None:
    names = ["opening", *GOLDEN]
    each = [(VECTORS / f"{name}.frame").read_bytes() for name in names]
    data = b"".join(each)
    frames = raw_frames(data, 0, len(data), len(each), 64)
    assert [frame.content for frame in frames] == each[1:]
    for count in (len(each) + 1, len(each) + 2):
        with pytest.raises(Corrupt, match="run past their group"):
            raw_frames(data, 0, len(data), count, 64)
    for length in (0, 43, len(data) + 1):
        wrong = struct.pack("<I", length) + data[4:]
        with pytest.raises(Corrupt, match=f"frame of {length} bytes"):
            raw_frames(wrong, 0, len(data), len(each), 64)


@pytest.mark.parametrize("name", ["topic_put", "records_appended_extra"])
def test_a_raw_frame_whose_topic_cannot_be_read_is_told(name: str) -> None:
    data = bytearray((VECTORS / f"{name}.frame").read_bytes())
    data[FRAME_HEADER_BYTES] = 0xC1  # never used in MessagePack
    with pytest.raises(Corrupt):
        raw_frames(bytes(data), 0, len(data), 1, 64)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(4, b"\0"), (4, b"\xff"), (5, b"\0"), (5, b"\x07"), (6, b"\xff\xff"), (8, bytes(8))],
    ids=["kind 0", "kind 255", "format 0", "format 7", "extra beyond the frame", "lsn 0"],
)
def test_a_raw_frame_with_an_impossible_header_is_told(offset: int, value: bytes) -> None:
    """As `decode_frames` does: the archive must not get a frame that no restore can read."""
    for name in ("topic_dropped", "records_appended"):
        data = (VECTORS / f"{name}.frame").read_bytes()
        wrong = data[:offset] + value + data[offset + len(value) :]
        for read in (decode_frames, raw_frames):
            with pytest.raises(Corrupt):
                read(wrong, 0, len(wrong), 1, 64)


def test_bytes_behind_raw_frames_are_told() -> None:
    data = (VECTORS / "records_appended.frame").read_bytes()
    for more in (7, 8):
        longer = data + bytes(more)
        if more == 7:
            assert len(raw_frames(longer, 0, len(longer), 1, 64)) == 1
        else:
            with pytest.raises(Corrupt, match="8 bytes behind the frames"):
                raw_frames(longer, 0, len(longer), 1, 64)


def test_every_kind_has_a_golden_frame() -> None:
    kinds = {(VECTORS / f"{name}.frame").read_bytes()[4] for name in [*GOLDEN, "opening"]}
    assert kinds == set(Kind)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("session")])
def test_what_is_no_topics_has_the_reserved_id(name: str) -> None:
    data = (VECTORS / f"{name}.frame").read_bytes()
    assert struct.unpack_from("<Q", data, 16) == (SESSIONS_ID,)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("router_")])
def test_routers_have_their_own_reserved_id(name: str) -> None:
    data = (VECTORS / f"{name}.frame").read_bytes()
    assert struct.unpack_from("<Q", data, 16) == (ROUTERS_ID,)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("leases")])
def test_leases_have_their_own_reserved_id(name: str) -> None:
    data = (VECTORS / f"{name}.frame").read_bytes()
    assert struct.unpack_from("<Q", data, 16) == (LEASES_ID,)


def test_an_append_of_the_first_format_is_as_it_always_was() -> None:
    data = (VECTORS / "records_appended_extra.frame").read_bytes()
    assert (data[5], data[FRAME_HEADER_BYTES]) == (1, 0x94)  # msgpack: an array of four


def test_traces_are_refused_by_older_servers() -> None:
    """A server from before traces would lose them: it reads append frames up to format 5, grammar
    6.
    """
    traced = (VECTORS / "records_appended_traced.frame").read_bytes()
    assert traced[5] == 6
    columns = (VECTORS / "records_appended_traced_columns.frame").read_bytes()
    assert columns[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + 5] == b"\x96\xc0\xc0\xc0\x07"


@pytest.mark.parametrize("name", ["source", "redrive", "delayed", "keyed"])
def test_marks_delays_and_keys_are_refused_by_older_servers(name: str) -> None:
    """Values that older servers would silently ignore have a format that they refuse."""
    data = (VECTORS / f"records_appended_{name}.frame").read_bytes()
    assert (data[5], data[FRAME_HEADER_BYTES]) == (2, 0x95)


def test_a_large_body_is_referenced_not_copied() -> None:
    body = b"x" * 100_000
    buffers = encode_entry(1, RecordsAppended(1, 1, 1, TS, body))
    assert any(buffer is body for buffer in buffers)
    assert decode_one(b"".join(buffers))[1] == RecordsAppended(1, 1, 1, TS, body)


def test_the_decoded_body_is_never_written() -> None:
    from topics_server.values.appends import decode_append

    plain = RecordsAppended(7, 42, 2, TS, BODY)
    with_decoded = RecordsAppended(7, 42, 2, TS, BODY, decoded=decode_append(BODY))
    assert encode_entry(5, plain) == encode_entry(5, with_decoded)


@pytest.mark.parametrize("characters", [1, 31, 32, 255, 256])
@pytest.mark.parametrize("number", [0, 127, 128, 2**16, PRODUCER_NUMBER_MAX])
def test_of_an_append_that_only_names_its_producer_the_extra_is_all_six_fields(
    characters: int, number: int
) -> None:
    stamp = ProducerStamp("é" * characters, number, number)
    (frame,) = encode_entry(5, RecordsAppended(7, 42, 2, TS, BODY, producer=stamp))
    extra = msgspec.msgpack.encode((None, None, None, 1, None, stamp))
    assert frame[5] == 4
    assert frame[FRAME_HEADER_BYTES:] == extra + BODY


@given(
    st.binary(max_size=9000),
    st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=256),
    st.none() | st.builds(Floor, st.integers(0, 2**63 - 1), st.sampled_from(LossReason)),
    st.integers(1, 2**64 - 1),
)
def test_appends_come_back_as_they_were(
    body: bytes, key: str | None, floor: Floor | None, lsn: int
) -> None:
    entry = RecordsAppended(9, 2**62, 1, TS, body, key, None, floor)
    data = b"".join(encode_entry(lsn, entry))
    assert decode_one(data) == (lsn, entry)
    assert raw_frames(data, 0, len(data), 1, 64) == [RawFrame(lsn, 9, 2**62, None, data)]


def damaged(name: str, offset: int, value: bytes) -> bytes:
    data = bytearray((VECTORS / f"{name}.frame").read_bytes())
    data[offset : offset + len(value)] = value
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (damaged("head_reserved", 4, b"\x00"), "kind is not known"),
        (damaged("head_reserved", 4, b"\x63"), "newer version"),
        (damaged("head_reserved", 5, b"\x02"), "format 2"),
        (damaged("head_reserved", 0, b"\x00"), "frame of"),
        (damaged("head_reserved", 0, struct.pack("<I", FRAME_BYTES_MAX)), "frame of"),
        (damaged("head_reserved", 8, bytes(8)), "impossible"),
        (damaged("records_appended", 6, b"\xff\xff"), "impossible"),
        (damaged("records_deleted", 40, b"\x04"), "columns"),
        (damaged("topic_put", 16, b"\x08"), "topic ids differ"),
        (damaged("floor_moved", 44, b"\xc1"), "frame of kind 6"),
        (damaged("topic_dropped", 44, b"\xff"), "frame of kind 3"),
        (damaged("records_appended_extra", 44, b"\xc1"), "frame of kind 4"),
        (damaged("session_opened", 44, b"\xc1"), "frame of kind 8"),
        (damaged("session_moved", 44, b"\xc1"), "frame of kind 9"),
        (damaged("sessions_closed", 44, b"\xc1"), "frame of kind 10"),
        (damaged("records_appended_delayed", 48, b"\x08"), "grammar 8 is not known"),
        (damaged("records_appended_delayed", 48, b"\x00"), "grammar 0 is not known"),
        (damaged("session_opened", 16, b"\x07"), "topic ids differ"),
        (damaged("leases_granted", 44, b"\xc1"), "frame of kind 11"),
        (damaged("leases_released", 44, b"\xc1"), "frame of kind 12"),
        (damaged("leases_extended", 44, b"\xc1"), "frame of kind 13"),
        (damaged("leases_granted", 16, b"\xff"), "topic ids differ"),
        (damaged("leases_extended", 4, b"\x0c"), "missing required field"),
        (damaged("records_appended_source", 44, b"\x94"), "length 5, got 4"),
        (damaged("records_appended_source", 5, b"\x03"), "length 6, got 5"),
        (damaged("records_appended_source", 5, b"\x04"), "length 6, got 5"),
        (damaged("records_appended_source", 5, b"\x05"), "length 7, got 5"),
        (damaged("records_appended_source", 5, b"\x06"), "length 8, got 5"),
        (damaged("records_appended_source", 5, b"\x07"), "format 7"),
        (
            b"".join(encode_entry(1, RecordsAppended(7, 44, 2, TS, BODY, trace=TRACE[1:]))),
            "a trace of 54 bytes",
        ),
        (damaged("stream_changed", 44, b"\xc1"), "frame of kind 18"),
        (damaged("stream_changed", 16, b"\x08"), "topic ids differ"),
        (damaged("router_put", 16, b"\xff"), "topic ids differ"),
        (damaged("cursor_moved", 0, b"\x33"), "not a router's id"),
        (damaged("router_put", 44, b"\xc1"), "frame of kind 15"),
        (damaged("router_deleted", 44, b"\xc1"), "frame of kind 16"),
        (damaged("records_appended", 5, b"\x02"), "frame of kind 4"),
        (damaged("session_moved", 5, b"\x02"), "format 2"),
        (damaged("session_moved", 4, b"\x08"), "missing required field"),
        (damaged("opening", 5, b"\x07"), "opening"),
        (b"\x00" * (FRAME_HEADER_BYTES - 1), "run past"),
        ((VECTORS / "head_reserved.frame").read_bytes() + bytes(8), "8 bytes behind"),
    ],
)
def test_a_frame_that_cannot_be_read_is_corrupt(data: bytes, reason: str) -> None:
    with pytest.raises(Corrupt, match=reason):
        decode_frames(data, 0, len(data), 1, 64)
