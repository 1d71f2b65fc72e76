"""Snapshots.

- `parts`: reads the parts of a snapshot without the engine.
- `store`: published snapshots: the newest valid one counts, two are kept.
"""
