"""Guards of decisions 0362, records that are stored as JSON objects, and 0370, waiting turns."""

from __future__ import annotations

from typing import Final

from tests.guards.guard import Guard, guards

OBJECTS: Final[list[Guard]] = [
    *guards(
        "wal/segments/packing.py",
        "unit/wal/segments/test_packing.py",
        (
            "only JSON records without a trace are stored as objects",
            "return not self.kinds.any() and most",
            "return most",
        ),
        (
            "a run whose objects may not fit into a file is stored as records",
            " + _OBJECT_BYTES_MAX * self.count < _FILE_BYTES_MAX",
            " < _FILE_BYTES_MAX * 2",
        ),
        (
            "objects beside dead records are made one by one",
            "    if not run.data_bytes[rows].all():\n        return",
            "    if False:\n        return",
        ),
    ),
    *guards(
        "values/columns/json_rows.py",
        "unit/wal/segments/test_packing.py",
        (
            "an absent `meta` is no member of an object",
            "            meta_key * (split < end),",
            "            meta_key,",
        ),
    ),
    *guards(
        "wal/format/segment.py",
        "unit/wal/format/test_segment_blocks.py",
        (
            "a read checks the rows of the index that it uses",
            "if found != self.sums[count + first : count + last + 1].tolist():",
            "if False:",
        ),
        (
            "and the row behind them, where the last record ends",
            "last = min(rows.stop, len(self.rows) - 1) // GROUP_RECORDS",
            "last = (rows.stop - 1) // GROUP_RECORDS",
        ),
    ),
    *guards(
        "wal/format/segment.py",
        "unit/wal/format/test_segment.py",
        (
            "an index before version 4 is verified whenever it is mapped",
            "if verify or version != JSON_VERSION:",
            "if verify:",
        ),
    ),
    *guards(
        "wal/format/segment.py",
        "unit/wal/format/test_segment.py",
        (
            "a search for a tag compares the rows that it finds",
            "not is_found[before : before + len(rows)].all() or is_found.sum() != len(rows)",
            "False",
        ),
        (
            "and that each of them stands there once",
            "        if (ascending[1:] <= ascending[:-1]).any():\n",
            "        if False:\n",
        ),
    ),
    *guards(
        "wal/format/segment.py",
        "unit/wal/format/test_segment_blocks.py",
        (
            "a read compares the names that it shows",
            "        if names_sum(self.tags, self.nodes) != self.names_sum:\n",
            "        if False:\n",
        ),
    ),
    *guards(
        "wal/segments/reading.py",
        "storage/segments/test_segments.py",
        (
            "a read replaces an index that is damaged on the disk",
            "            self._mend_index(topic_id, segment_id)\n        return self",
            "            raise\n        return self",
        ),
    ),
    *guards(
        "engine/background/packing.py",
        "unit/engine/background/test_packing.py",
        (
            "a segment packed ahead is kept while its records are the next to be sealed",
            "        if topic is None or not is_front(topic.log, ahead.plan.blocks):\n",
            "        if False:\n",
        ),
    ),
    *guards(
        "api/waiting_turn.py",
        "unit/api/test_waiting_turn.py",
        (
            "a task that begins in a slice costs the slice",
            "            waiting.cost_ms = task_cost_ms(waiting.size)\n",
            "",
        ),
        (
            "a defect in a waiting request is its own answer",
            "except Exception as error:",
            "except (TopicsError, StorageError) as error:",
        ),
    ),
    *guards(
        "wal/format/segment_blocks.py",
        "storage/segments/test_read_now.py",
        (
            "objects are served if the checksum of their group holds",
            "if not _has_sound_groups(data, columns, rows, bounds[:-1], size):",
            "if False:",
        ),
        (
            "tags without `meta` are rendered from blocks",
            "if has_tags and has_metas:\n        return None\n    if has_tags:",
            "if has_tags:",
        ),
    ),
    *guards(
        "wal/segments/reading.py",
        "storage/segments/test_read_now.py",
        (
            "objects are read in whole groups",
            "if columns.is_json and columns.are_groups(rows) else None",
            "if columns.is_json else None",
        ),
    ),
    *guards(
        "wal/segments/mending.py",
        "storage/segments/test_read_now.py",
        (
            "a check of a segment finds damaged tags and stamps",
            "if columns.is_json and not has_sound_stamps(fs, data_path, columns):",
            "if False:",
        ),
    ),
    *guards(
        "wal/segments/salvage.py",
        "unit/wal/segments/test_salvage.py",
        (
            "an object is intact if its stamp, its tag and its text are",
            "        if found ^ xxhash.xxh3_64_intdigest(tag) != checksum:\n            continue\n",
            "",
        ),
        (
            "a group with a lost record fails its check",
            '        sums[np.flatnonzero(np.frombuffer(lost, "u1")) // GROUP_RECORDS] = 0\n',
            "",
        ),
    ),
    *guards(
        "engine/read/segment_reader.py",
        "unit/engine/read/test_segment_reader_now.py",
        (
            "the objects of a page share its bound of bytes",
            "                    object_bytes_left -= len(objects.body)\n",
            "",
        ),
        (
            "only a reader that renders records gets objects",
            "if shown & DATA:",
            "if True:",
        ),
    ),
]
