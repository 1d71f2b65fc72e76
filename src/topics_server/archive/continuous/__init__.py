"""The continuous archive: bases, and the journal in parts; restores to any moment.

A *base* is a backup (`archive/backup`) in `bases/`. A *part* has the journal's entries after those
of the part before it, of all shards, by lsn. Parts form one sequence of numbers and each names the
checksum of the one before it, so an archive is one history. docs/FORMATS.md, The archive, shows the
objects.

- `bases`: the bases of an archive, and the stretch of parts that each begins or belongs to.
- `format`: the bytes of a part and of the other objects, and their names. Pure.
- `history`: reads an archive: its parts, and which of them are contiguous.
- `journal_tail`: reads the newest synced frames of a running server's journal as raw bytes.
- `moments`: the moments that can be restored, and the cut of a restore.
- `places/`: the places for an archive: a folder, or a bucket of an object store.
- `position`: the file in the data directory that stores how far the archive is.
- `prune`: removes bases and parts that no rule keeps.
- `restoring`: makes a data directory as of a moment.
- `segment_copies`: the archive's segments, as copies for a server that has damaged ones.
- `shipper`: writes parts, one after the other.
- `steps`: splits work on many frames into short steps, between which other threads run.
- `verifying`: reads a whole archive and reports damage.
"""
