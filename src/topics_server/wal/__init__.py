"""Files and disks: the only package that opens, writes, syncs and renames.

It knows entries and bytes, no rules of topics, and never imports `engine`. Formats are pure
modules (bytes in, values out; docs/FORMATS.md draws them); everything that touches a file goes
through `fs`, so that tests can stand a failing disk in its place. Damage is told apart here: *torn*
lies above what is known to have been synced, *corrupt* below.

- the directory: `layout` (names), `directory` (lock, format, boot and clean-stop marks), `folders`
  (directories whose names last), `cold_folder` (whose the cold folder is), `checked_json` (the
  bytes of `FORMAT` and `STORE`), `fs` (the file system, and the seam that tests replace)
- the journal's bytes: `frames` (an entry), `groups` (what one write takes, and the file header),
  `grouping` (which frames form a group)
- how far it reaches, told beside it: `end_marks` (bytes), `end_mark_file` (the file), `anchors`
  (what the rest of the directory knows of the journal, and what follows for its files)
- the journal: `tail` (files, room ahead, rotation) under `shard` (queue, write, sync, watermarks),
  with `jobs` and `workers` for what runs on its thread; `journal` (all shards, lsn, trim)
- reading it again: `chain` (the files of a shard), `repair` (torn bytes kept aside), `replay`
  (entries of all shards by lsn)
- sealed segments: `segment_format`, `segment_blocks` (records to bytes and back), `packer` (that
  in a helper process), `segments` (put, read, flip, move, drop) with `segment_files`,
  `segment_index`, `segment_maps`, `handles` (open files, counted), `listed` and `publishing` (the
  manifest), `manifest_format`
- snapshots: `snapshot_format`, `snapshots` (publish, newest valid, prune)
- offline: `dump`, `verifying`, `parts`, `begin_anew`, `mending` (a damaged journal) with
  `end_mark_repair` and `set_aside`
"""
