"""Analytics over sealed segments, beside the server: an Arrow reader, a Spark source, jobs.

Map: `query` (what is asked for), `listing` (manifests to segments: one snapshot of what is sealed),
`segments` (one segment to Arrow batches), `columns` (bytes to Arrow columns), `packing` (segments
to partitions), `report` (what a task read and what it could not), `options` (texts to a query),
`filters` (Spark's to a query), `datasource` and `streaming` (PySpark), `export`, `sources`,
`records` and `exporting` (files without Spark), `session` (Java, Spark), `catalog` and `job` (what
all jobs share), `outputs` (folders that jobs write to), `pipeline` and `pipeline_config` (all of it
with one command), `pictures` (matplotlib), `installing` (what to install); every other module is
the job of its name. Of the server only `topics_server.wal.segment_format`, `wal.manifest_format`,
`wal.layout` and the `errors` they raise are imported; a test says so.
"""
