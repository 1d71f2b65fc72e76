"""Files and disks: the only package that opens, writes, syncs and renames.

It knows entries and bytes, no rules of topics, and never imports `engine`. Formats are pure
modules (bytes in, values out); everything that touches a file goes through `fs`, so that tests can
stand a failing disk in its place. Damage is told apart here: *torn* lies above what is known to
have been synced, *corrupt* below.

- `frames`, `segment_format`, `snapshot_format`, `manifest_format`, `layout`, `grouping` — pure
- `fs`, `directory` — the file system; lock, format and boot marks of a data directory
- `shard`, `journal`, `replay` — the write-ahead log
- `segments`, `packer`, `snapshots` — what outlives it
- `dump` — print and verify a data directory, offline
"""
