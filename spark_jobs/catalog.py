"""The jobs by name, with a one-line description; `topics jobs` lists them without starting
Spark.
"""

from __future__ import annotations

from typing import Final

JOBS: Final = {
    "topic_volume": "Records and bytes per topic over time: rates, sizes, percentiles.",
    "tag_activity": "The busiest tags, when each was seen first and last, and their churn.",
    "queue_latency": "From enqueue to claim to ack, out of a queue and its lease log.",
    "router_lag": "How far an exactly-once router's copies are behind their source.",
    "payload_schema": "The JSON schema of each topic's payloads, and when it changed.",
    "sessions": "Sessions per node or tag: runs of records with no longer gap between them.",
    "integrity_audit": "Every checksum, flag and seq; exit code 1 when something is wrong.",
    "to_parquet": "Sealed records as Parquet by topic and day: text, VARIANT or typed.",
    "to_iceberg": "An Iceberg table for each topic, each sealed record once; needs no Spark.",
}
# Packages that jobs without Spark need; see `running.installing`.
WITHOUT_SPARK: Final = {"to_iceberg": "iceberg"}
# Jobs that write a lake. A pipeline has its own lake, so it cannot run them by day.
LAKES: Final = ("to_parquet", "to_iceberg")
