"""One topic and the registry of all: every rule that a write must pass.

- `applied`: what applying one entry changed.
- `consumers/`: named, durable cursors of the topic's readers.
- `dedupe`: the idempotency keys of one topic.
- `deletion`: finds the live seqs that a delete matches.
- `prefix_counts`: counts topics per key prefix.
- `producers`: the producers of one topic: next sequence, repeats, fenced epochs.
- `quotas`: server-wide limits over all topics (§11).
- `registry`: all topics by name and id, their epochs and totals.
- `retention`: computes how far caps and TTL move the floor.
- `sealed_files`: the facts about a topic's sealed files: flips, digests, generation.
- `staging`: one topic's queue of decided entries that are not applied yet.
- `stream_facts`: the stream state of one topic.
- `topic`: the state of one topic: log, staged entries, sealed files.
- `writes/`: decides each kind of write on a topic, and applies it.
"""
