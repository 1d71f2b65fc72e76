"""The rows of the metrics of backups, of the archive, of the scrub, and of mends.

Called by `metric_table`.
"""

from __future__ import annotations

from typing import Final

from topics_server.runtime.metric_rows import MetricRow, MetricSection

_BACKUP_ROWS: Final = (
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

_ARCHIVE_ROWS: Final = (
    MetricRow(
        "gauge",
        "topics_archive_lag_seconds",
        "Age of the oldest change that is not in the archive; 0: there is none.",
        lambda archive: archive.lag_s,
    ),
    MetricRow(
        "gauge",
        "topics_archive_lag_bytes",
        "Bytes journaled since the newest part of the archive.",
        lambda archive: archive.lag_bytes,
    ),
    MetricRow(
        "gauge",
        "topics_archive_kept_bytes",
        "Bytes of journal files that are kept for the archive only.",
        lambda archive: archive.kept_bytes,
    ),
    MetricRow(
        "counter",
        "topics_archive_parts",
        "Parts written since the server started.",
        lambda archive: archive.parts,
    ),
    MetricRow(
        "counter",
        "topics_archive_part_bytes",
        "Bytes of these parts.",
        lambda archive: archive.bytes,
    ),
    MetricRow(
        "counter",
        "topics_archive_bases",
        "Bases written since the server started.",
        lambda archive: archive.bases,
    ),
    MetricRow(
        "gauge",
        "topics_archive_base_timestamp_ms",
        "When the newest base was made, ms since the epoch; 0: there is none.",
        lambda archive: archive.base_ts_ms,
    ),
    MetricRow(
        "counter",
        "topics_archive_gaps",
        "Gaps since the server started: moments between two stretches cannot be restored.",
        lambda archive: archive.gaps,
    ),
    MetricRow(
        "counter",
        "topics_archive_errors",
        "Calls of the archive that failed and were, or will be, tried again.",
        lambda archive: archive.errors,
    ),
    MetricRow(
        "gauge",
        "topics_archive_stopped",
        "1: nothing is archived until the server is started with an archive of its own.",
        lambda archive: archive.stopped,
    ),
)
_SCRUB_ROWS: Final = (
    MetricRow(
        "counter",
        "topics_scrub_bytes",
        "Bytes of sealed segments that the scrub has read since the server started.",
        lambda scrub: scrub.bytes,
    ),
    MetricRow(
        "counter",
        "topics_scrub_passes",
        "Whole passes of the scrub since the server started.",
        lambda scrub: scrub.passes,
    ),
    MetricRow(
        "gauge",
        "topics_scrub_last_pass_timestamp_ms",
        "When the last whole pass ended, ms since the epoch; 0: none has since the start.",
        lambda scrub: scrub.last_pass_ts_ms,
    ),
    MetricRow(
        "counter",
        "topics_scrub_damaged_records",
        "Records that the scrub found damaged since the server started.",
        lambda scrub: scrub.damaged_records,
    ),
    MetricRow(
        "counter",
        "topics_scrub_failures",
        "Segments that the scrub could not read, or whose index is damaged.",
        lambda scrub: scrub.failures,
    ),
)
_MENDING_ROWS: Final = (
    MetricRow(
        "counter",
        "topics_mended_segments",
        "Damaged segments that were mended from the archive since the server started.",
        lambda mending: mending.segments,
    ),
    MetricRow(
        "counter",
        "topics_mended_records",
        "Damaged records that came back with them.",
        lambda mending: mending.records,
    ),
    MetricRow(
        "counter",
        "topics_mend_failures",
        "Mends that failed; each is tried again.",
        lambda mending: mending.failures,
    ),
    MetricRow(
        "gauge",
        "topics_mend_waiting_segments",
        "Damaged segments that are not mended yet.",
        lambda mending: mending.waiting,
    ),
)
KEEPING: Final = (
    MetricSection(lambda facts: facts.backups, _BACKUP_ROWS),
    MetricSection(lambda facts: facts.archive, _ARCHIVE_ROWS),
    MetricSection(lambda facts: facts.scrub, _SCRUB_ROWS),
    MetricSection(lambda facts: facts.mending, _MENDING_ROWS),
)
