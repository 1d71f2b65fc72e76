"""The write-ahead log: writers, files, replay.

- `anchors`: compares the journal with the facts that other files hold about it.
- `end_mark_file`: reads and writes a shard's end mark file.
- `file_chain`: the journal files on disk and the chain they form.
- `group_commit`: chooses the frames of the next group and whether it needs a sync.
- `journal`: the open journal: all shards, lsn, trim. Implements the engine's journal port.
- `make_durable`: makes recovered data durable: cuts torn ends, syncs the rest.
- `replay`: reads the journal at start: entries by lsn, torn ends, durability.
- `sizing`: sizes for this machine: open files, journal files, free-space floor.
- `sync_policy`: stores how far a shard is written and synced, and decides when it syncs.
- `wal_file`: the current journal file of a shard: preallocation, writes, rotation.
- `wal_writer`: one shard's writer: groups entries, writes, syncs and reports them.
- `workers`: runs a shard's blocking calls: on a thread, or inline in tests.
- `writer_jobs`: the jobs of a shard's writer thread, and their counters.
"""
