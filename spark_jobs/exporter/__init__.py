"""Exports without Spark: records of segments or of a server as files.

- `exporting`: the state of an export and its files.
- `records`: the form of records in an export.
- `sources`: the sources of an export: segments or a server.
"""
