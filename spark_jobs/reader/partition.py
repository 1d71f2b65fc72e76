"""The partition of one Spark task."""

from __future__ import annotations

from pyspark.sql.datasource import InputPartition

from spark_jobs.reader.places.segment import Segment


class TopicsPartition(InputPartition):
    """Segments, or pieces of them, that one task reads."""

    def __init__(self, segments: list[Segment]) -> None:
        super().__init__(None)
        self.segments = segments
