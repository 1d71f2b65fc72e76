"""Makes Spark find the data source.

Spark 4.0 imports packages with this name prefix and registers their `DefaultSource`.
"""

from spark_jobs.datasource import TopicsDataSource as DefaultSource

__all__ = ["DefaultSource"]
