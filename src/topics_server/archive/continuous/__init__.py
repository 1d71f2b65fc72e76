"""The continuous archive: the journal shipped in parts, on bases, and restores to any moment.

A *base* is a backup (`archive/backup`) in `bases/`. A *part* holds the journal's entries behind the
part before it, of all shards, by lsn. Parts form one sequence of numbers and each names the
checksum of the one before it, so an archive is one history. docs/FORMATS.md, The archive, draws the
objects.

- `bases`: which bases an archive has, and which stretch of parts each begins or belongs to.
- `format`: the bytes of a part and of the other objects, and their names. Pure.
- `history`: reads an archive: parts, moments, and where they are contiguous.
- `journal_tail`: reads the newest synced frames of a running server's journal, as they are.
- `moments`: the moments that can be restored, and the cut that a restore asks for.
- `places/`: where an archive may lie: a folder, a bucket of an object store.
- `position`: the file in the data directory that says how far the archive is.
- `prune`: removes bases and parts that no rule keeps.
- `restoring`: makes a data directory as of a moment.
- `segment_copies`: the archive's segments, as copies for a server that has damaged ones.
- `shipper`: writes parts, one after the other.
- `steps`: work on many frames in short steps, between which the other threads run.
- `verifying`: reads a whole archive and names what is damaged.
"""
