"""Exports without Spark: records of segments or of a server as files.

- `exporting`: the state of an export and its files.
- `records`: records as an export writes them.
- `sources`: where an export reads from: segments or a server.
"""
