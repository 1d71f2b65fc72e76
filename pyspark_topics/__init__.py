"""Spark looks for packages of such names and registers their `DefaultSource` by itself (4.0)."""

from spark_jobs.datasource import TopicsDataSource as DefaultSource

__all__ = ["DefaultSource"]
