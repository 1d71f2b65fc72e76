"""Sealed segments, their manifests and indexes.

- `file_handles`: open files for reading, with a bound; closes the least recently used.
- `files`: the files of a topic's segments in both tiers, and their delete flags.
- `index`: the mapped index columns of one sealed segment.
- `maps`: maps segment indexes into memory and bounds how many are mapped.
- `mending`: replaces the damaged files of a segment with whole ones.
- `packing`: packs blocks into segment bytes and unpacks rows.
- `packing_process`: the helper process that packs segments.
- `quarantine`: keeps damaged segment files aside after their replacement.
- `reading`: reads records of sealed segments.
- `salvage`: rebuilds a damaged index from its data file, row by row.
- `store`: sealed segments of all topics, hot and cold. Implements the segments port.
- `topic_manifest`: one topic's list of segments, in memory and as its manifest.
- `topic_scan`: scans one topic's folders at start and applies the manifest.
"""
