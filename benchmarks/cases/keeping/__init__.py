"""What keeping a copy of a store costs.

- `archived`: appends with an archive, its lag, and restores.
"""
