"""Files and disks: the only package that opens, writes, syncs and renames.

It handles entries and bytes; the rules of topics are not here. Formats are pure modules
(docs/FORMATS.md shows the layouts); every access to files goes through `fs`, so that tests can
replace it with a failing disk. Damage above the synced end of the journal is *torn*, below it
*corrupt*.

- `format/`: the bytes of every file. Pure; Spark loads `segment` and `manifest`.
- `journal/`: the write-ahead log: writers, files, replay.
- `segments/`: sealed segments, their manifests and indexes.
- `snapshots/`: snapshots.
- `tools/`: offline tools: dump, verify, repair.
- `atomic_write`: publishes a file atomically: write beside, sync, rename, sync the directory.
- `ballast`: reserved disk space that is released when the disk is full.
- `cold_folder`: the cold folder's root: its owner store and its lock.
- `directory`: the data directory: lock, format, store id, boot and clean-stop marks.
- `disk_space`: free disk space: when appends are refused and the ballast is released.
- `folders`: creates directories durably, parents included.
- `fs`: the file system interface: the only module that opens, writes and syncs.
- `restored`: the file `RESTORED`: what a restored store must not use again.
- `layout`: file and directory names of a data directory, in both directions.
"""
