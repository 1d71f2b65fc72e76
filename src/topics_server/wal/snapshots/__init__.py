"""Snapshots.

- `parts`: reads the parts of a snapshot without the engine.
- `store`: published snapshots: two are kept, and the newest valid one is used.
"""
