"""Backups: a consistent copy of a store in another folder, and its restore.

A backup is a snapshot, the sealed segments that the manifests list, and the journal from the
snapshot's start up to one lsn. Segments are stored once under a name with their checksum and shared
by all backups; everything else belongs to one backup (docs/FORMATS.md, The backup folder).

- `backup`: makes one backup, in steps that may run beside a server.
- `continuous/`: the continuous archive: bases and parts of the journal; restores to any moment.
- `expected`: checks whether a backup lacks a manifest that its snapshot expects.
- `folder_owner`: which store a backup folder belongs to, and whether it is still that folder.
- `format`: the bytes of a backup, and the names of its files. Pure.
- `journal_copy`: reads entries out of the journal of a running server.
- `journal_restore`: writes entries into the journal of a restored store.
- `known`: collects the seqs, ids and epochs that a new history must not use again.
- `object_store`: the storage of backups: named objects, each put once, completely or not at all.
- `offline`: backs up the data directory of a stopped server.
- `repository`: the backups of a folder: list, verify, prune.
- `restore`: makes a data directory from a backup.
- `retention`: decides which backups `--keep 7d,4w,12m` keeps. Pure.
- `sealed`: copies segments into a backup folder and back.
"""
