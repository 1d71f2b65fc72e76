"""Named, durable cursors of a topic's readers.

- `changes`: decides and applies changes of a consumer.
- `positions`: the positions of one topic's consumers, applied or in flight.
"""
