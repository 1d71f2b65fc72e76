"""Reads one snapshot of the sealed segments into Arrow batches and Spark.

- `columns`: turns bytes of a segment into Arrow columns.
- `filters`: turns filters of Spark into a query.
- `listing`: lists the segments of manifests: one snapshot of the sealed records.
- `options`: turns texts of options into a query.
- `packing`: packs segments into partitions.
- `partition`: the partition of one Spark task.
- `payload`: payloads as text, VARIANT or typed columns.
- `places/`: places of segments: a data directory, or an archive in a folder or a bucket.
- `query`: the query of a read as one value: columns, ranges, names, and strictness.
- `report`: counts what a task read and what it left out.
- `segments`: reads one segment into Arrow batches.
- `streaming`: the streaming source.
"""
