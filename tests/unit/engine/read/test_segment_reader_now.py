"""Pages read without a wait for the disk: the pages of the other way, and no call off the loop."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.unit.engine.drive import seqs_of
from tests.unit.engine.rig import RULES, Rig, sealed_topic
from topics_server.engine.answers import JsonPage, JsonPiece, Page, Piece, ReadRequest
from topics_server.engine.topic.topic import Topic
from topics_server.values.blocks import Block
from topics_server.values.columns.json_rows import JsonBlock
from topics_server.values.errors import StorageError
from topics_server.values.json_cache import DATA, META, TAGS, JsonCache
from topics_server.values.limits import BLOCK_RECORDS_MAX, MIB, PAGE_BYTES_MAX
from topics_server.values.model import TagMatch

pytestmark = pytest.mark.anyio

SHOWN = DATA | META | TAGS
RECORDS = 10 * BLOCK_RECORDS_MAX
# The groups that a page reads on the loop.
MOST = 8 * BLOCK_RECORDS_MAX
# The last records of the first group, and the first ones of the second.
EDGE = range(BLOCK_RECORDS_MAX - 5, BLOCK_RECORDS_MAX + 5)


class Bench:
    """A topic of sealed records; notes the rows that were read directly."""

    def __init__(self) -> None:
        self.rig = Rig(rules=msgspec.structs.replace(RULES, max_records=4 * BLOCK_RECORDS_MAX))
        self.segments = self.rig.segments
        self.segments.is_in_memory = True
        self.rows: list[tuple[int, range]] = []
        plain = self.segments.read_now

        def noted(topic_id: int, segment_id: int, rows: range, most: int) -> Block | None:
            self.rows.append((segment_id, rows))
            return plain(topic_id, segment_id, rows, most)

        self.segments.read_now = noted  # type: ignore[method-assign]

    async def fill(self, size: int = 4) -> Topic:
        tags = ["edge" if n in EDGE else f"t{n % 5}" for n in range(1, RECORDS + 1)]
        data = "x" * size
        return await sealed_topic(
            self.rig, [{"data": data, "tag": tag, "meta": {"n": n}} for n, tag in enumerate(tags)]
        )

    def direct(self, from_seq: int, limit: int, max_bytes: int = PAGE_BYTES_MAX) -> Page | None:
        return self.rig.store.read_resident("t", ReadRequest(from_seq, limit, max_bytes))

    async def plain(self, from_seq: int, limit: int) -> Page:
        """The page of the other way, which calls off the loop, read with an empty cache."""
        bench = Bench()
        bench.segments.is_in_memory = False
        await bench.fill()
        return await bench.rig.store.read("t", ReadRequest(from_seq, limit, PAGE_BYTES_MAX))


def rendered(page: Page | JsonPage | None) -> bytes:
    """The records of a page as they are sent."""
    assert page is not None
    cache = JsonCache()
    parts: list[bytes | memoryview] = []
    for piece in page.pieces:
        parts += cache.slices(piece.block, piece.rows, SHOWN, is_kept=piece.is_kept)
    return b",".join(parts)


@pytest.mark.parametrize(
    ("from_seq", "limit"), [(0, 1), (0, 1000), (100, 1000), (255, 2), (1000, 700), (1023, 2)]
)
async def test_a_direct_page_is_the_page_of_the_other_way(from_seq: int, limit: int) -> None:
    bench = Bench()
    await bench.fill()
    direct, plain = bench.direct(from_seq, limit), await bench.plain(from_seq, limit)
    assert rendered(direct) == rendered(plain)
    assert direct is not None
    assert msgspec.structs.replace(direct, pieces=[]) == msgspec.structs.replace(plain, pieces=[])
    assert bench.segments.reads == 0, "nothing was read off the loop"


async def test_groups_that_follow_each_other_are_one_read_and_one_piece() -> None:
    bench = Bench()
    await bench.fill()
    page = bench.direct(100, 600)
    assert page is not None
    assert [rows for _, rows in bench.rows] == [range(768)]
    assert [(piece.rows, piece.is_kept) for piece in page.pieces] == [(range(100, 700), False)]


async def test_a_page_across_two_segments_is_read_from_each() -> None:
    bench = Bench()
    await bench.fill()
    page = bench.direct(1000, 100)
    assert page is not None
    first, second = (segment for segment, _ in bench.rows)
    assert first != second
    assert [rows for _, rows in bench.rows] == [range(768, 1024), range(256)]


async def test_a_page_is_kept_for_the_next_reader() -> None:
    bench = Bench()
    await bench.fill()
    first = bench.direct(0, 1000)
    bench.rows.clear()
    bench.segments.is_in_memory = False
    assert rendered(bench.direct(0, 1000)) == rendered(first)
    assert rendered(await bench.rig.store.read("t", ReadRequest(0, 1000, PAGE_BYTES_MAX)))
    assert bench.rows == []
    assert bench.segments.reads == 0


async def test_only_the_groups_that_are_not_kept_are_read() -> None:
    bench = Bench()
    await bench.fill()
    bench.direct(256, 256)
    bench.rows.clear()
    assert rendered(bench.direct(0, 1000)) == rendered(await bench.plain(0, 1000))
    assert [rows for _, rows in bench.rows] == [range(256), range(512, 1024)]


async def test_a_page_with_deleted_records_shows_the_others() -> None:
    bench = Bench()
    await bench.fill()
    await bench.rig.store.delete("t", before_seq=None, match=TagMatch("t3"))
    page = bench.direct(0, 1000)
    seqs = [record["$seq"] for record in json.loads(b"[%b]" % rendered(page))]
    assert seqs == [seq for seq in range(1, 1500) if seq % 5 != 3 or seq in EDGE][:1000]
    assert bench.segments.reads == 0


async def test_rows_on_both_sides_of_a_hole_are_two_pieces() -> None:
    bench = Bench()
    await bench.fill()
    await bench.rig.store.delete("t", before_seq=None, match=TagMatch("edge"))
    page = bench.direct(0, 500)
    assert page is not None
    assert [piece.rows for piece in page.pieces] == [range(250), range(260, 510)]
    assert seqs_of(page) == [*range(1, 251), *range(261, 511)]


@pytest.mark.parametrize(("limit", "is_direct"), [(MOST, True), (MOST + 1, False)])
async def test_more_groups_are_read_off_the_loop(limit: int, is_direct: bool) -> None:
    bench = Bench()
    await bench.fill()
    assert (bench.direct(0, limit) is not None) == is_direct
    page = await bench.rig.store.read("t", ReadRequest(0, limit, PAGE_BYTES_MAX))
    assert sum(len(piece.rows) for piece in page.pieces) == limit


async def test_more_bytes_are_read_off_the_loop() -> None:
    bench = Bench()
    size = MIB // (2 * BLOCK_RECORDS_MAX)
    await bench.fill(size)
    assert bench.direct(0, BLOCK_RECORDS_MAX, 64 * MIB) is not None
    # Two groups have more bytes than a page may read, in one segment and in two.
    assert bench.direct(2 * BLOCK_RECORDS_MAX, 2 * BLOCK_RECORDS_MAX, 64 * MIB) is None
    assert bench.direct(3 * BLOCK_RECORDS_MAX, 2 * BLOCK_RECORDS_MAX, 64 * MIB) is None


async def test_rows_that_are_not_in_memory_or_damaged_are_left_to_the_other_way() -> None:
    bench = Bench()
    topic = await bench.fill()
    bench.segments.is_in_memory = False
    assert bench.direct(0, 10) is None
    bench.segments.is_in_memory = True
    bench.segments.damaged[topic.topic_id, bench.rows[0][0]] = (3, 3)
    assert bench.direct(0, 10) is None
    page = await bench.rig.store.read("t", ReadRequest(0, 10, PAGE_BYTES_MAX))
    assert seqs_of(page) == [1, 2, 3]


# -- JSON objects ------------------------------------------------------------------------------


class JsonBench(Bench):
    """Counts the reads of blocks: `rows` has only those of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = 0
        plain, objects = self.segments.read_now, self.segments.read_json_now

        def counted(topic_id: int, segment_id: int, rows: range, most: int) -> Block | None:
            self.blocks += 1
            return plain(topic_id, segment_id, rows, most)

        def found(
            topic_id: int, segment_id: int, rows: range, most: int, shown: int
        ) -> JsonBlock | None:
            self.segments.read_now = plain  # type: ignore[method-assign]
            try:
                return objects(topic_id, segment_id, rows, most, shown)
            finally:
                self.segments.read_now = counted  # type: ignore[method-assign]

        self.segments.read_now = counted  # type: ignore[method-assign]
        self.segments.read_json_now = found  # type: ignore[method-assign]

    def as_json(
        self, from_seq: int, limit: int, max_bytes: int = PAGE_BYTES_MAX
    ) -> Page | JsonPage | None:
        return self.rig.store.read_json("t", ReadRequest(from_seq, limit, max_bytes), SHOWN)

    async def soon(self, from_seq: int, limit: int) -> Page | JsonPage | None:
        """The same off the loop, from the disk."""
        asked = ReadRequest(from_seq, limit, PAGE_BYTES_MAX)
        return await self.rig.store.read_json_from_disk("t", asked, SHOWN)


@pytest.mark.parametrize(
    ("from_seq", "limit"), [(0, 5), (0, 1000), (100, 1000), (255, 300), (1000, 700), (1020, 50)]
)
async def test_a_page_of_objects_is_the_page_of_the_other_way(from_seq: int, limit: int) -> None:
    bench = JsonBench()
    await bench.fill()
    page, plain = bench.as_json(from_seq, limit), await bench.plain(from_seq, limit)
    assert isinstance(page, JsonPage)
    assert rendered(page) == rendered(plain)
    assert page.page == msgspec.structs.replace(plain, pieces=[])
    assert page.scanned == plain.scanned
    assert (bench.blocks, bench.segments.reads) == (0, 0)


async def test_objects_are_read_together_and_kept_at_the_second_read() -> None:
    bench = JsonBench()
    await bench.fill()
    pages: list[bytes] = []
    for is_read in (True, True, False, False):
        bench.rows.clear()
        page = bench.as_json(100, 1000)
        assert isinstance(page, JsonPage)
        assert [piece.rows for piece in page.pieces] == [range(100, 1024), range(76)]
        assert [rows for _, rows in bench.rows] == [range(1024), range(256)] * is_read
        pages.append(rendered(page))
    assert len(set(pages)) == 1
    assert bench.blocks == 0


async def test_objects_that_are_kept_have_the_members_that_are_shown() -> None:
    bench = JsonBench()
    await bench.fill()
    for _ in range(3):
        for shown in (DATA, DATA | META, SHOWN):
            page = bench.rig.store.read_json("t", ReadRequest(0, 9, PAGE_BYTES_MAX), shown)
            record = json.loads(b"[%b]" % rendered(page))[0]
            assert ("meta" in record, "$tag" in record) == (shown & META != 0, shown & TAGS != 0)


async def test_objects_of_a_mended_segment_are_read_again() -> None:
    bench = JsonBench()
    topic = await bench.fill()
    for _ in range(3):
        bench.as_json(0, 1000)
    bench.rows.clear()
    bench.rig.fetcher.forget(topic.topic_id, min(bench.segments.kept[1]))
    bench.as_json(0, 1000)
    assert [rows for _, rows in bench.rows] == [range(1024)]


async def test_records_deleted_from_kept_objects_are_not_shown() -> None:
    bench = JsonBench()
    await bench.fill()
    for _ in range(3):
        bench.as_json(0, 500)
    await bench.rig.store.delete("t", before_seq=None, match=TagMatch("edge"))
    page = bench.as_json(0, 500)
    seqs = [record["$seq"] for record in json.loads(b"[%b]" % rendered(page))]
    assert seqs == [*range(1, 251), *range(261, 511)]


async def test_objects_are_preferred_to_blocks_in_memory() -> None:
    bench = JsonBench()
    await bench.fill()
    # Another reader has read one group in the middle.
    assert bench.direct(256, 256) is not None
    page = bench.as_json(0, 1000)
    assert isinstance(page, JsonPage)
    assert [type(piece) for piece in page.pieces] == [JsonPiece]
    assert rendered(page) == rendered(await bench.plain(0, 1000))


async def test_blocks_in_memory_are_served_where_there_are_no_objects() -> None:
    bench = JsonBench()
    await bench.fill()
    bench.segments.read_json_now = lambda *_: None  # type: ignore[method-assign]
    assert bench.direct(256, 256) is not None
    bench.blocks = 0
    page = bench.as_json(0, 768)
    assert isinstance(page, Page)
    assert [len(piece.rows) for piece in page.pieces] == [256, 256, 256]
    assert bench.blocks == 2, "the groups before and after it"
    assert rendered(page) == rendered(await bench.plain(0, 768))
    # All groups are kept now.
    bench.segments.is_in_memory = False
    assert rendered(bench.as_json(0, 768)) == rendered(page)


async def test_objects_on_the_disk_are_read_off_the_loop_and_kept_at_the_second_read() -> None:
    bench = JsonBench()
    topic = await bench.fill()
    bench.segments.is_in_memory = False
    assert bench.as_json(100, 1000) is None
    bench.blocks = 0
    for _ in range(2):
        page = await bench.soon(100, 1000)
        assert isinstance(page, JsonPage)
        assert [piece.rows for piece in page.pieces] == [range(100, 1024), range(76)]
        assert rendered(page) == rendered(await bench.plain(100, 1000))
    assert bench.segments.json_reads == 4, "one for each segment"
    assert (bench.blocks, bench.segments.reads) == (0, 0)
    # They have been read twice.
    assert rendered(bench.as_json(100, 1000)) == rendered(page)
    # Records in memory follow them.
    await bench.rig.append("t", {"records": [{"data": "new"}]})
    page = await bench.soon(RECORDS - 3, 10)
    assert isinstance(page, JsonPage)
    assert [type(piece) for piece in page.pieces] == [JsonPiece, Piece]
    # A page without a sealed record, and one with damage, are left to the other way.
    assert await bench.soon(RECORDS, 10) is None
    bench.segments.damaged[topic.topic_id, min(bench.segments.kept[1])] = (3, 3)
    assert await bench.soon(0, 10) is None


@pytest.mark.parametrize("is_in_memory", [True, False])
async def test_small_pages_read_a_group_once(is_in_memory: bool) -> None:
    bench = JsonBench()
    await bench.fill()
    bench.segments.is_in_memory = is_in_memory
    seqs: list[int] = []
    for from_seq in range(0, 2 * BLOCK_RECORDS_MAX, 8):
        page = bench.as_json(from_seq, 8) or await bench.soon(from_seq, 8)
        assert isinstance(page, JsonPage)
        seqs += [record["$seq"] for record in json.loads(b"[%b]" % rendered(page))]
    assert seqs == list(range(1, 2 * BLOCK_RECORDS_MAX + 1))
    reads = [rows for _, rows in bench.rows] if is_in_memory else bench.segments.json_reads
    assert reads == ([range(256), range(256, 512)] if is_in_memory else 2)


async def test_pages_of_large_groups_on_the_disk_are_left_to_the_other_way() -> None:
    bench = JsonBench()
    await bench.fill(2 * MIB // BLOCK_RECORDS_MAX)
    assert await bench.soon(0, 10) is not None
    bench = JsonBench()
    await bench.fill(5 * MIB // BLOCK_RECORDS_MAX)
    assert await bench.soon(0, 10) is None


async def test_tags_without_meta_are_made_of_the_blocks_in_memory() -> None:
    bench = JsonBench()
    await bench.fill()
    assert bench.direct(0, 256) is not None
    bench.rows.clear()
    asked = ReadRequest(0, 10, PAGE_BYTES_MAX)
    assert isinstance(bench.rig.store.read_json("t", asked, DATA | TAGS), Page)
    assert bench.rows == []
    assert await bench.rig.store.read_json_from_disk("t", asked, DATA | TAGS) is None


async def test_a_segment_that_cannot_be_read_is_left_to_the_other_way() -> None:
    bench = JsonBench()
    await bench.fill()
    bench.segments.fault = StorageError("the disk does not answer")
    assert await bench.soon(0, 10) is None


async def test_objects_that_were_read_beside_a_mend_are_not_used() -> None:
    bench = JsonBench()
    topic = await bench.fill()
    plain = bench.segments.read_json

    def beside_a_mend(
        topic_id: int, segment_id: int, rows: range, most: int, shown: int
    ) -> JsonBlock | None:
        bench.rig.fetcher.forget(topic.topic_id, segment_id)
        return plain(topic_id, segment_id, rows, most, shown)

    bench.segments.read_json = beside_a_mend  # type: ignore[method-assign]
    assert await bench.soon(0, 10) is None


async def test_records_in_memory_follow_objects() -> None:
    bench = JsonBench()
    await bench.fill()
    await bench.rig.append("t", {"records": [{"data": "new"}]})
    page = bench.as_json(RECORDS - 3, 10)
    assert isinstance(page, JsonPage)
    assert [type(piece) for piece in page.pieces] == [JsonPiece, Piece]
    records = json.loads(b"[%b]" % rendered(page))
    assert [record["$seq"] for record in records] == list(range(RECORDS - 2, RECORDS + 2))
    # A page without a sealed record is a plain one.
    assert isinstance(bench.as_json(RECORDS, 10), Page)


async def test_deleted_records_are_cut_out_of_objects() -> None:
    bench = JsonBench()
    await bench.fill()
    await bench.rig.store.delete("t", before_seq=None, match=TagMatch("t3"))
    page = bench.as_json(0, 1000)
    seqs = [record["$seq"] for record in json.loads(b"[%b]" % rendered(page))]
    assert seqs == [seq for seq in range(1, 1500) if seq % 5 != 3 or seq in EDGE][:1000]
    assert bench.blocks == 0


async def test_segments_without_objects_are_read_as_blocks() -> None:
    bench = JsonBench()
    await bench.fill()
    bench.segments.read_json_now = lambda *_: None  # type: ignore[method-assign]
    assert bench.as_json(0, MOST + 1) is None, "too many groups for the loop's thread"
    assert isinstance(bench.as_json(0, 1000), Page)


async def test_a_page_across_an_old_and_a_new_segment_has_both_forms() -> None:
    bench = JsonBench()
    await bench.fill()
    objects = bench.segments.read_json_now
    old = min(bench.segments.kept[1])

    def of_new(
        topic_id: int, segment_id: int, rows: range, most: int, shown: int
    ) -> JsonBlock | None:
        return None if segment_id == old else objects(topic_id, segment_id, rows, most, shown)

    bench.segments.read_json_now = of_new  # type: ignore[method-assign]
    page = bench.as_json(100, 1000)
    assert isinstance(page, JsonPage)
    assert [type(piece) for piece in page.pieces] == [Piece, JsonPiece]
    assert rendered(page) == rendered(await bench.plain(100, 1000))


async def test_more_groups_are_read_as_objects_than_as_blocks() -> None:
    bench = JsonBench()
    await bench.fill()
    page = bench.as_json(0, RECORDS)
    assert rendered(page) == rendered(await bench.plain(0, RECORDS))
    assert bench.as_json(0, RECORDS, 64 * MIB) is not None


async def test_more_bytes_of_objects_are_read_off_the_loop() -> None:
    bench = JsonBench()
    await bench.fill(2 * MIB // BLOCK_RECORDS_MAX)
    assert bench.as_json(0, BLOCK_RECORDS_MAX, 64 * MIB) is not None
    # Two groups have more bytes than a page may read, in one segment and in two.
    assert bench.as_json(2 * BLOCK_RECORDS_MAX, 2 * BLOCK_RECORDS_MAX, 64 * MIB) is None
    assert bench.as_json(3 * BLOCK_RECORDS_MAX, 2 * BLOCK_RECORDS_MAX, 64 * MIB) is None
