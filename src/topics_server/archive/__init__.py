"""Backups: a consistent copy of a store in another folder, and the way back.

A backup is a snapshot, the sealed segments that the manifests list, and the journal from the
snapshot's start up to one lsn. Segments are stored once under a name with their checksum and shared
by all backups; everything else belongs to one backup (docs/FORMATS.md, The backup folder).

- `backup`: makes one backup, in steps that may run beside a server.
- `continuous/`: the continuous archive: parts of the journal on bases; restores to any moment.
- `expected`: judges whether a backup lacks a manifest that the snapshot knows.
- `folder_owner`: whose backups a folder holds, and whether it is the folder that it was.
- `format`: the bytes of a backup, and the names of its files. Pure.
- `journal_copy`: reads entries out of the journal of a running server.
- `journal_restore`: writes entries into the journal of a restored store.
- `known`: collects the seqs, ids and epochs that a new history must not use again.
- `object_store`: where backups lie: objects with names, put once, whole or not at all.
- `offline`: backs up the data directory of a stopped server.
- `repository`: the backups of a folder: list, verify, prune.
- `restore`: makes a data directory from a backup.
- `retention`: which backups `--keep 7d,4w,12m` keeps. Pure.
- `sealed`: copies segments into a backup folder and back.
"""
