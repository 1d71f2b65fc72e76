"""Named, durable cursors of a topic's readers.

- `changes`: what may change a consumer, and what a change does.
- `positions`: where the consumers of one topic are, applied or in flight.
"""
