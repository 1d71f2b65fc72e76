"""Verbs that run Spark and exports.

- `export`: `topics export`: writes records as Parquet, NDJSON or Arrow files.
- `jobs`: `topics jobs`: lists the analytics jobs or runs one with Spark.
- `pipeline`: `topics pipeline`: from the log to a lake with one command.
- `spark_package`: finds `spark_jobs`, its packages and its help for the analytics verbs.
"""
