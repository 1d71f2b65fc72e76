"""The decision and the effect of each kind of write on a topic.

- `append`: appends to one topic: what a call may append, and what an append changes.
- `apply`: performs any entry of a topic.
- `condition`: what must hold of a topic when a write is decided.
- `configure`: the life of one topic: configure, drop, reserve seqs, stream facts.
- `delete`: deletes and moved floors: which records go, and what that changes.
- `keyed_records`: appends that have an idempotency key for each record.
"""
