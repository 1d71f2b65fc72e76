"""The decision and the effect of each kind of write on a topic.

- `append`: appends to one topic: decides and applies them.
- `apply`: applies any entry of a topic.
- `condition`: conditions that a topic must meet when a write is decided.
- `configure`: the life of one topic: configure, drop, reserve seqs, stream facts.
- `delete`: deletes and moved floors: decides and applies them.
- `keyed_records`: appends that have an idempotency key for each record.
"""
