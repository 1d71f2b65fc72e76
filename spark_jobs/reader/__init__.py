"""Reading sealed segments: one snapshot of what is sealed, to Arrow batches and Spark.

- `columns`: bytes of a segment to Arrow columns.
- `filters`: spark filters to a query.
- `listing`: manifests to segments: one snapshot of what is sealed.
- `options`: texts of options to a query.
- `packing`: segments to partitions.
- `partition`: the partition of one Spark task.
- `payload`: payloads as text, VARIANT or typed columns.
- `places/`: where segments lie: a data directory, or an archive in a folder or a bucket.
- `query`: the query of a read as one value: columns, ranges, names, and strictness.
- `report`: what a task read and what it could not.
- `segments`: one segment to Arrow batches.
- `streaming`: the streaming source.
"""
