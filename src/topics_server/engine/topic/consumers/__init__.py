"""Named, durable cursors of a topic's readers.

- `changes`: decides and applies changes of a consumer.
- `positions`: where the consumers of one topic are, applied or in flight.
"""
