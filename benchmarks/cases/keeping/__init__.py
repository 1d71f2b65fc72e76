"""The cost of keeping a copy of a store.

- `archived`: appends with an archive, its lag, and restores.
"""
