"""Each setting: a value that refuses the start, and the test of its effect.

`test_every_setting` fails for a setting without a row. To add one: a `Row` under its field's name,
in the order of `.env.example`; `bad` is a refused text, `effect` is FILE::TEST of a test that sets
`TOPICS_…` and observes the server's behaviour (not only the parsed value).
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Row(NamedTuple):
    """`is_path`: any text is a path; the server refuses it on use, with a line in the log."""

    bad: str
    effect: str
    is_path: bool = False


_SETTINGS: Final = "contract/operation/test_settings.py::"
_EFFECTS: Final = "settings/test_effects.py::"
_RESTART: Final = "contract/operation/test_restart.py::"
_LIMITS: Final = "contract/operation/test_limits.py::"
_SESSION: Final = "contract/watch/test_watch_session.py::"
_STREAMS: Final = "contract/streams/test_streams_door.py::"
_LOGS: Final = "contract/operation/test_logs.py::"
_BATCH: Final = "contract/records/test_append.py::test_each_batching_limit_has_its_variable"
_ARCHIVE: Final = "contract/operation/test_archive.py::"
_VIEWS: Final = "contract/views/test_views.py::"

ROWS: Final[dict[str, Row]] = {
    "host": Row("a b", _SETTINGS + "test_the_host_may_carry_the_port"),
    "port": Row("65536", _SETTINGS + "test_the_port_is_a_setting"),
    "port_file": Row("missing/port", _EFFECTS + "test_the_port_is_told_in_a_file", is_path=True),
    "data_dir": Row(
        "file/data", _SETTINGS + "test_the_data_live_where_the_setting_says", is_path=True
    ),
    "data_dir_mode": Row("0777", _SETTINGS + "test_the_data_directory_may_be_open_to_its_group"),
    "cold_dir": Row(
        "file/cold", _RESTART + "test_moving_to_the_cold_folder_changes_no_answer", is_path=True
    ),
    "backup_dir": Row(
        "backups",
        "contract/operation/test_backup.py::test_a_backup_goes_into_the_folder_of_the_setting",
    ),
    "archive_url": Row("/mnt/archive", _ARCHIVE + "test_everything_is_archived_all_the_time"),
    "archive_journal_bytes": Row("-1", _ARCHIVE + "test_the_journal_is_kept_up_to_the_setting"),
    "archive_base_interval_ms": Row(
        "999", _ARCHIVE + "test_bases_come_as_often_as_the_setting_says"
    ),
    "archive_rate_bytes": Row(
        "fast", _ARCHIVE + "test_the_archive_is_written_at_the_rate_of_the_setting"
    ),
    "min_free_bytes": Row("5XB", _RESTART + "test_a_nearly_full_disk_takes_deletes_but_no_appends"),
    "wal_shards": Row("0", _EFFECTS + "test_each_shard_has_its_files"),
    "wal_fsync_interval_ms": Row("0", _SETTINGS + "test_the_background_sync_is_a_setting"),
    "checkpoint_interval_ms": Row("9", _EFFECTS + "test_snapshots_come_after_time_or_bytes"),
    "checkpoint_wal_bytes": Row("4095", _EFFECTS + "test_snapshots_come_after_time_or_bytes"),
    "segment_max_events": Row("many", _EFFECTS + "test_a_segment_is_sealed_by_count_or_age"),
    "segment_max_bytes": Row("0", _RESTART + "test_segments_are_sealed_by_size_as_well"),
    "segment_max_age_ms": Row("-5", _EFFECTS + "test_a_segment_is_sealed_by_count_or_age"),
    "hot_retain_segments": Row("-1", _EFFECTS + "test_what_is_kept_hot_by_count_or_bytes"),
    "hot_retain_bytes": Row("1e9", _EFFECTS + "test_what_is_kept_hot_by_count_or_bytes"),
    "scrub_mib_per_second": Row(
        "-1", "settings/test_scrub.py::test_the_scrub_finds_damage_that_nobody_reads"
    ),
    "scrub_pass_ms": Row(
        "999", "settings/test_scrub.py::test_the_scrub_finds_damage_that_nobody_reads"
    ),
    "api_keys": Row("secret-1:x", _EFFECTS + "test_only_clients_with_a_key_get_access"),
    "api_keys_file": Row("missing", _EFFECTS + "test_keys_may_come_from_a_file"),
    "allow_insecure_no_auth": Row("maybe", _SETTINGS + "test_an_open_bind_may_be_insisted_on"),
    "allowed_hosts": Row("a b", _EFFECTS + "test_only_listed_names_are_served"),
    "probe_auth": Row("yes", _EFFECTS + "test_probes_may_ask_for_a_key_too"),
    "ready_degraded": Row(
        "500",
        "contract/operation/test_faults.py::test_a_degraded_server_may_be_taken_out_of_rotation",
    ),
    "cors_origins": Row(
        "example.org",
        "contract/access/test_cors.py::test_a_listed_origin_may_read_answers_and_errors",
    ),
    "max_body_bytes": Row("1e6", _BATCH),
    "max_batch_records": Row("0", _BATCH),
    "max_record_bytes": Row("0", _BATCH),
    "max_meta_bytes": Row("0", _BATCH),
    "max_tag_bytes": Row("65536", _BATCH),
    "max_node_bytes": Row("0", _BATCH),
    "max_limit": Row("0", "contract/records/test_diff.py::test_the_largest_limit_is_a_setting"),
    "max_claim": Row("0", "contract/queues/test_queue_claim.py::test_the_clamp_is_a_setting"),
    "max_topics": Row("none", _SETTINGS + "test_the_number_of_topics_can_be_capped"),
    "max_topics_per_prefix": Row(
        "-1", _LIMITS + "test_topics_and_sessions_of_a_prefix_can_be_capped"
    ),
    "max_routers": Row(
        "-1", "contract/routers/test_routers.py::test_the_number_of_routers_can_be_capped"
    ),
    "max_views": Row("-1", _VIEWS + "test_the_numbers_of_views_are_bounded"),
    "max_views_per_topic": Row("10001", _VIEWS + "test_the_numbers_of_views_are_bounded"),
    "view_max_bytes": Row("1", _VIEWS + "test_a_view_that_fills_its_file_stands_still"),
    "view_after_ms": Row(
        "0", _VIEWS + "test_a_query_beyond_the_head_times_out_in_the_contracts_words"
    ),
    "view_query_ms": Row("0", _VIEWS + "test_a_runaway_query_ends_and_nobody_else_notices"),
    "view_query_processes": Row("65", _VIEWS + "test_queries_run_in_so_many_processes"),
    "max_inflight_per_key": Row("-1", _LIMITS + "test_requests_of_one_key_are_capped"),
    "max_total_bytes": Row("x", _SETTINGS + "test_the_total_of_bytes_can_be_capped"),
    "max_connections": Row("-1", _LIMITS + "test_connections_are_capped_and_the_idle_make_room"),
    "max_receiving_bytes": Row(
        "-1",
        "crash/hostile/test_uploads.py::test_a_client_that_sends_everything_before_it_reads_gets_the_reason",
    ),
    "max_url_bytes": Row("1023", _LIMITS + "test_the_head_of_a_request_is_bounded"),
    "max_headers": Row("15", _LIMITS + "test_the_head_of_a_request_is_bounded"),
    "max_header_bytes": Row("1023", _LIMITS + "test_the_head_of_a_request_is_bounded"),
    "header_timeout_ms": Row("99", _LIMITS + "test_a_head_that_comes_too_slowly_is_408"),
    "body_timeout_ms": Row("99", _LIMITS + "test_a_body_that_comes_too_slowly_is_408"),
    "keep_alive_ms": Row("99", _LIMITS + "test_an_idle_connection_is_closed"),
    "write_timeout_ms": Row("99", _LIMITS + "test_an_unread_answer_times_out"),
    "max_watch_topics": Row("0", _SESSION + "test_the_number_of_topics_is_a_setting"),
    "max_watch_sessions": Row(
        "-1", _SESSION + "test_sessions_are_capped_and_expired_ones_make_room"
    ),
    "max_watch_sessions_per_prefix": Row(
        "-1", _LIMITS + "test_topics_and_sessions_of_a_prefix_can_be_capped"
    ),
    "max_sse_connections": Row(
        "-1",
        "contract/watch/test_watch_stream.py::test_streams_and_sockets_are_capped_and_the_end_of_one_makes_room",
    ),
    "max_sse_connections_per_key": Row("-1", _LIMITS + "test_streams_of_one_key_are_capped"),
    "session_ttl_ms": Row("0", _SESSION + "test_a_session_without_a_stream_is_reclaimed"),
    "buffer_grace_ms": Row(
        "-1",
        "contract/watch/test_watch_slow.py::"
        "test_past_the_grace_a_lossy_topic_is_cut_and_another_only_lags",
    ),
    "slow_consumer_timeout_ms": Row(
        "0",
        "contract/watch/test_watch_slow.py::test_past_the_timeout_the_connection_ends_with_an_error",
    ),
    "max_ws_message_bytes": Row(
        "63", "contract/watch/test_ws.py::test_a_message_over_the_limit_closes_with_1009"
    ),
    "max_ws_commands": Row("0", "contract/watch/test_ws.py::test_one_command_may_wait_at_a_time"),
    "streams_path": Row("/v0/streams", _STREAMS + "test_the_mount_is_a_setting"),
    "streams_port": Row("65536", _STREAMS + "test_a_second_port_serves_the_same"),
    "streams_page_bytes": Row("0", _STREAMS + "test_a_page_has_so_many_bytes"),
    "streams_long_poll_ms": Row("0", _STREAMS + "test_a_long_poll_ends_in_time"),
    "streams_sse_ms": Row("0", _STREAMS + "test_events_end_in_time"),
    "busy_poll_us": Row("10001", _EFFECTS + "test_the_server_polls_for_a_lone_client"),
    "shutdown_grace_ms": Row("-1", _EFFECTS + "test_a_stop_waits_no_longer_than_its_grace"),
    "log_level": Row("loud", _EFFECTS + "test_the_log_has_its_level_and_its_format"),
    "log_format": Row("xml", _EFFECTS + "test_the_log_has_its_level_and_its_format"),
    "access_log": Row(
        "loud", _LOGS + "test_full_logs_each_request_and_never_a_query_a_key_or_a_payload"
    ),
    "access_log_sample": Row("0", _LOGS + "test_sampled_logs_one_request_in_so_many"),
}
