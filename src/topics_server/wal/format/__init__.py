"""The bytes of every file. Pure; Spark loads `segment` and `manifest`.

- `checked_json`: small JSON files with a checksum: `FORMAT` and `STORE`.
- `end_marks`: the bytes of a shard's end mark: how far its journal reaches.
- `frames`: the bytes of one journal frame: entry to frame and back.
- `groups`: the bytes around frames: journal file header, groups, and their scan.
- `json_objects`: records that are stored as JSON objects, with their stamps and checksums.
- `manifest`: the bytes of a topic's manifest.
- `segment`: the bytes of a sealed segment: `.data` and `.idx`.
- `segment_blocks`: blocks, and JSON objects, from the bytes of a segment.
- `snapshot`: the bytes of a snapshot.
"""
