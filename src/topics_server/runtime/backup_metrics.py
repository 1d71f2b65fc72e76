"""The rows of the metrics of backups.

Called by `metric_table`.
"""

from __future__ import annotations

from typing import Final

from topics_server.runtime.metric_rows import MetricRow

BACKUP_ROWS: Final = (
    MetricRow(
        "gauge",
        "topics_backup_running",
        "1 while a backup is made.",
        lambda backups: backups.running,
    ),
    MetricRow(
        "counter",
        "topics_backups_made",
        "Backups made since the server started.",
        lambda backups: backups.made,
    ),
    MetricRow(
        "counter",
        "topics_backups_failed",
        "Backups that failed since the server started.",
        lambda backups: backups.failed,
    ),
    MetricRow(
        "gauge",
        "topics_backup_newest_timestamp_ms",
        "When the newest backup in the folder was made, ms since the epoch; 0: there is none.",
        lambda backups: backups.newest_ts_ms,
    ),
)
