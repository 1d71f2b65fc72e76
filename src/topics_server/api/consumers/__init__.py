"""Routes of consumers: named, durable cursors of a topic's readers.

- `handlers`: PUT, state, list, commit, DELETE.
- `requests`: request shapes.
"""
