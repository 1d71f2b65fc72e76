"""Guards of decision 0358: sealed pages that are rendered by columns and read at once."""

from __future__ import annotations

from typing import Final

from tests.guards.guard import Guard, guards

SEALED: Final[list[Guard]] = [
    *guards(
        "wal/format/segment.py",
        "unit/wal/segments/test_packing.py",
        (
            "the bound of a page counts tags that are not in `.data`",
            "names_bytes = min(len(self.tags.text), TEXT_BYTES_MAX)",
            "names_bytes = 0",
        ),
        (
            "the bound of a page counts framing",
            "return end - start + (RECORD_FRAMING_BYTES + names_bytes) * (end_row - first_row)",
            "return end - start + names_bytes * (end_row - first_row)",
        ),
    ),
    *guards(
        "values/columns/json_rows.py",
        "unit/values/columns/test_json_rows.py",
        (
            "strings with a quote are encoded one by one",
            "return [] if b'\\\\\"' in text else text",
            "return text",
        ),
        (
            "times of different lengths are written one by one",
            "if least < 0 or digits_of(least) != time_digits or",
            "if",
        ),
        (
            "seqs of different lengths are written one by one",
            " or digits_of(last_seq) != seq_digits:",
            ":",
        ),
    ),
    *guards(
        "values/json_cache.py",
        "unit/values/columns/test_json_rows.py",
        (
            "only plain JSON records are rendered by columns",
            "return block.kinds.count(_JSON, rows[0], rows[-1] + 1) == count",
            "return True",
        ),
        (
            "only unbroken rows are rendered by columns",
            "if count < COLUMNS_ROWS_MIN or rows[-1] - rows[0] != count - 1:",
            "if count < COLUMNS_ROWS_MIN:",
        ),
    ),
    *guards(
        "values/columns/cutting.py",
        "unit/values/columns/test_cutting.py",
        (
            "pieces that overlap are sliced one by one",
            "        and (starts[1:] >= ends[:-1]).all()\n",
            "",
        ),
        (
            "texts with NUL are decoded one by one",
            ' if len(texts) == len(pieces) else list(map(str, pieces, repeat("utf-8")))',
            "",
        ),
    ),
    *guards(
        "wal/segments/index.py",
        "storage/segments/test_read_now.py",
        (
            "rows of unknown flags are not read at once",
            "if columns is None or self.bad_rows or not self.is_readable:",
            "if columns is None or not self.is_readable:",
        ),
        (
            "a read at once maps no index",
            "if columns is None or self.bad_rows",
            "columns = self.columns()\n        if self.bad_rows",
        ),
        (
            "a read at once has a bound of bytes",
            "if start < end <= start + most else None",
            "if start < end else None",
        ),
    ),
    *guards(
        "wal/segments/file_handles.py",
        "storage/segments/test_read_now.py",
        (
            "a read at once does not wait for the lock of the files",
            "if not self._lock.acquire(blocking=False):",
            "if not self._lock.acquire(timeout=1):",
        ),
        (
            "no thread waits for the end of a read at once",
            "            return handle.file.pread_now(length, offset)\n",
            "            with self._lock:\n"
            "                return handle.file.pread_now(length, offset)\n",
        ),
        (
            "a file that is read at once is not closed",
            "return self.users == 0 and not self.is_read_now",
            "return self.users == 0",
        ),
        (
            "a file that is dropped during a read at once is closed afterwards",
            "                self._close_dropped(handle)\n",
            "                pass\n",
        ),
    ),
    *guards(
        "wal/fs.py",
        "storage/test_fs.py",
        (
            "bytes of which some are not in memory are not served",
            "return data if found == length else None",
            "return data",
        ),
    ),
    *guards(
        "engine/read/segment_reader.py",
        "unit/engine/read/test_segment_reader_now.py",
        (
            "a page reads eight groups at once at most",
            "if groups_left < 0:",
            "if groups_left < -99:",
        ),
        (
            "the groups of a page share its bound of bytes",
            "                    bytes_left -= read\n",
            "",
        ),
        (
            "objects are preferred to blocks in memory",
            "may_be_kept = not (may_be_json and fetch.is_group)",
            "may_be_kept = True",
        ),
        (
            "tags without `meta` are made of the blocks in memory",
            "return bool(shown & DATA) and shown & (TAGS | META) != TAGS",
            "return bool(shown & DATA)",
        ),
        (
            "a page that has most of its groups does not keep them at once",
            "return 2 * wanted < sum(",
            "return bool(wanted) or wanted < sum(",
        ),
        (
            "objects of a mended segment are forgotten",
            "        self._objects.forget(topic_id, segment_id)\n",
            "",
        ),
        (
            "objects are kept with the members that they have",
            "key = topic_id, segment_id, rows.start, rows.stop, shown\n",
            "key = topic_id, segment_id, rows.start, rows.stop, 0\n",
        ),
        (
            "blocks in memory are used where there are no objects",
            "together = self._uncached(topic_id, together, fetched)",
            "pass",
        ),
        (
            "objects that were read beside a mend are not used",
            "if parts is None or mended != self._mended:",
            "if parts is None:",
        ),
        (
            "a segment whose objects cannot be read is left to the other way",
            "                except StorageError:\n                    return None\n"
            "                if objects",
            "                except ZeroDivisionError:\n                    return None\n"
            "                if objects",
        ),
    ),
    *guards(
        "engine/read/object_cache.py",
        "unit/engine/read/test_object_cache.py",
        (
            "a walk keeps no objects",
            "if not is_part and key not in self._seen:",
            "if False:",
        ),
        (
            "objects of which a page has a small part are kept at once",
            "if not is_part and key",
            "if key",
        ),
        (
            "the cache of objects has a bound",
            "while self.held_bytes > self.max_bytes:",
            "while False:",
        ),
    ),
    *guards(
        "engine/read/page_parts.py",
        "unit/engine/read/test_segment_reader_now.py",
        (
            "only rows that follow each other are one piece",
            "return both and before[-1] + 1 == rows[0]",
            "return both",
        ),
    ),
    *guards(
        "engine/reads.py",
        "model/reads/test_plain_reads.py",
        (
            "a read at once ends where the request ends",
            "plan = plan_page(topic, request, now_ms, request.before_seq - 1, may_span=shown != 0)",
            "plan = plan_page(topic, request, now_ms, may_span=shown != 0)",
        ),
    ),
]
