"""Analytics over sealed segments, outside the server: an Arrow reader, a Spark source, jobs.

The package imports only `topics_server.wal.format.segment`, `wal.format.manifest`, `wal.layout` and
their errors from the server; a test checks that.

- `reader/`: reads one snapshot of the sealed segments into Arrow batches and Spark.
- `exporter/`: exports without Spark: records of segments or of a server as files.
- `running/`: code that all jobs share: arguments, outputs, pictures, installation messages.
- `catalog`: the jobs by name, with a one-line description of each.
- `datasource`: the PySpark data source `topics`.
- `export`: `topics export`.
- `integrity_audit`: job: every checksum, flag and seq.
- `payload_schema`: job: the JSON schema of payloads, and its changes.
- `pipeline`: `topics pipeline`.
- `queue_latency`: job: the times from enqueue to claim to ack.
- `router_lag`: job: the delay of copies behind their source.
- `session`: a Spark session that finds Java and the source.
- `sessions`: job: sessions per node or tag.
- `tag_activity`: job: the busiest tags.
- `to_iceberg/`: job: an Iceberg table for each topic, without Spark.
- `to_parquet`: job: sealed records as Parquet.
- `topic_volume`: job: records and bytes per topic over time.
"""
