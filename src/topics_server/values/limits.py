"""Every hard limit of the server, and the relations between limits.

Configurable limits (those with an environment name) are in `settings/settings.py`; these limits are
constants. The relations are asserted at import, so that changing one number cannot make another one
wrong.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# --- seqs and times -----------------------------------------------------------------------
U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1
# Seqs stay below 2**63 inside the server (numpy int64 columns); the contract accepts any u64 as a
# cursor.
SEQ_MAX: Final = 2**63 - 1

# --- views --------------------------------------------------------------------------------
# SQL of one definition or one query; characters of each text, and of all texts together.
VIEW_SQL_BYTES_MAX: Final = 32 * KIB
VIEW_STATEMENTS_MAX: Final = 64
VIEW_QUERIES_MAX: Final = 64
VIEW_PARAMS_MAX: Final = 64
# The limits of the answer of one query.
VIEW_ROWS_MAX: Final = 10_000
VIEW_ROWS_BYTES_MAX: Final = 4 * MIB
# The maximum of queries that wait for a process or for `after`; further ones are refused.
VIEW_WAITING_MAX: Final = 2_000
# The maximum of streams of live queries.
VIEW_LIVE_MAX: Final = 1_000

# --- requests -----------------------------------------------------------------------------
JSON_DEPTH_MAX: Final = 512
# The limit of the body of a request that appends nothing (a key without the right to write sends no
# other requests), and of WebSocket commands except publishes. Appends have the configured limit
# `max_body_bytes`.
CONTROL_BODY_BYTES_MAX: Final = MIB
# The default limit of a WebSocket message: a publish command with the largest record.
WS_MESSAGE_BYTES_DEFAULT: Final = CONTROL_BODY_BYTES_MAX + 64 * KIB
# No further message of a WebSocket is read while its unanswered publishes have this many bytes.
WS_UNANSWERED_BYTES_MAX: Final = MIB
# Larger append bodies are decoded in a helper process; at most this many bytes wait for it. The
# decoder and the depth check would hold the loop for 20 ms on a hostile body of 2 MiB.
LARGE_APPEND_BYTES_MIN: Final = MIB
LARGE_APPENDS_WAITING_BYTES_MAX: Final = 512 * MIB
# How many appends with gzip bodies, inflated off the loop, are served at the same time: the size of
# a compressed body does not show how much work it causes.
INFLATED_APPENDS_MAX: Final = 4
# The maximum of members of a control-plane body; every member is examined.
CONTROL_MEMBERS_MAX: Final = 1000
# The limit of an append's `config`, which replaces a control-plane body.
INLINE_CONFIG_BYTES_MAX: Final = CONTROL_BODY_BYTES_MAX
# How many unknown members of a body the answer names, and the length of each name.
IGNORED_MEMBERS_MAX: Final = 16
IGNORED_NAME_CHARS_MAX: Final = 64
TOPIC_NAME_CHARS_MAX: Final = 255
IDEMPOTENCY_KEY_CHARS_MAX: Final = 256
META_KEYS_MAX: Final = 64
# A longer `X-Request-Id` is replaced; a WebSocket command with a longer id is refused.
REQUEST_ID_BYTES_MAX: Final = 128
WS_REQUEST_ID_CHARS_MAX: Final = 256
# The maximum of topics that one `POST /v0/admin/seal` may name.
SEAL_TOPICS_MAX: Final = 1000
# Each member of a gzip body costs some microseconds, even if it is empty.
GZIP_MEMBERS_MAX: Final = 1000
# How many bytes of a request's text an error message repeats.
ECHO_BYTES_MAX: Final = 256
PAGE_SIZE_DEFAULT: Final = 100
PAGE_SIZE_MAX: Final = 1000
DIFF_LIMIT_DEFAULT: Final = 256
DIFF_WAIT_MS_MAX: Final = 30_000
# The byte budget of one page (contract §11: default 1 MiB, clamped to 8 MiB).
PAGE_BYTES_DEFAULT: Final = MIB
PAGE_BYTES_MAX: Final = 8 * MIB
# After this many slots a page returns with its cursor advanced (contract README, Scan bound).
PAGE_SCAN_SLOTS_MAX: Final = 65_536
# The maximum of look-ups of a filter in unsealed records for one page. Most filters need one
# look-up for each distinct tag; a filter that combines many leaves needs up to 256.
PAGE_LOOKUPS_MAX: Final = 16_384
# The maximum of sealed segments that one page of a filtered read searches, in total and at once.
SEARCHED_SEGMENTS_MAX: Final = 64
SEARCHED_AT_ONCE: Final = 8
# The maximum of prefixes of one live stream.
LIVE_PREFIXES_MAX: Final = 16
# After skipping this many slots a filtered stream sends its position to its client.
SKIPPED_SLOTS_MAX: Final = PAGE_SCAN_SLOTS_MAX
# The limits of the filter of a read.
FILTER_LEAVES_MAX: Final = 256
FILTER_DEPTH_MAX: Final = 8
FILTER_BYTES_MAX: Final = 256 * KIB
# The limit of a filter that is stored with a watch session.
SESSION_FILTER_BYTES_MAX: Final = 16 * KIB
# The maximum of consumers (named cursors of readers), for one topic and for the server.
CONSUMERS_PER_TOPIC_MAX: Final = 10_000
CONSUMERS_MAX: Final = 100_000
# The maximum of consumers for which one topic's caps keep records: each append to a full topic
# examines all of them.
HOLDS_PER_TOPIC_MAX: Final = 16
# The limit of the `if` of a write: a filter and a few numbers.
CONDITION_BYTES_MAX: Final = FILTER_BYTES_MAX + KIB
# The maximum length of a time as text.
TIME_CHARS_MAX: Final = 64
PRIORITY_MAX: Final = 1000
LEASE_MS_MIN: Final = 100
LEASE_MS_MAX: Final = 86_400_000
CLAIM_JITTER_MS_MAX: Final = 5_000
# The reason of a nack; a longer reason is cut.
NACK_ERROR_BYTES_MAX: Final = 1_024
# A job waits at most ten years; longer delays are clamped.
DELAY_MS_MAX: Final = 10 * 366 * 86_400_000
NODE_FILTER_IDS_MAX: Final = 256
# On disk the length of a tag or node has 16 bits: no configured limit is higher.
TEXT_BYTES_MAX: Final = 65_535
# The limit of a tag in a `match` or a `filter`, or of a prefix with its `*`.
MATCH_TAG_BYTES_MAX: Final = TEXT_BYTES_MAX + 1
# The number of elements of a `match`, as in `["tag", "Eq", "X"]`.
MATCH_PARTS: Final = 3
# The default mount of streams.
STREAMS_PATH: Final = "/v1/stream"
# The limits of streams: a decoded path, a content type, a writer's `Stream-Seq`, and a TTL, which
# in ms must stay exact in a double.
STREAM_PATH_BYTES_MAX: Final = 1024
STREAM_TYPE_CHARS_MAX: Final = 255
STREAM_SEQ_BYTES_MAX: Final = 1024
STREAM_TTL_S_MAX: Final = (2**53 - 1) // 1000

# The maximum of requests that wait on one connection while an earlier one is being answered.
PIPELINED_MAX: Final = 128

# The size of the kernel's buffer for one connection's unread bytes (the kernel doubles it for its
# own needs). The default is up to 4 MiB, and one call that sends an answer may fill all of it,
# which takes milliseconds.
SEND_BUFFER_BYTES: Final = 256 * KIB
# The maximum of unread bytes of all connections together.
UNREAD_BYTES_MAX: Final = 256 * MIB

# How many dropped names keep their own last epoch; older names share one epoch floor.
DROPPED_NAMES_MAX: Final = 100_000

# The slowest upload is refused first: the one that took longest for its last `UPLOAD_STEP_BYTES`.
UPLOAD_STEP_BYTES: Final = 64 * KIB
# How many bytes are received and dropped after an upload was refused, so that the client reads the
# error response.
LINGER_BYTES_MAX: Final = 64 * MIB
LINGER_MS_MAX: Final = 30_000

# The maximum of records of one move: the frame's extra, whose length is a u16, holds their seqs.
MOVE_RECORDS_MAX: Final = 1_000

# --- the log ------------------------------------------------------------------------------
# Records of one block: the unit that is rendered once, cached, sealed and captured.
BLOCK_RECORDS_MAX: Final = 256
BLOCK_BYTES_MAX: Final = 4 * MIB
# A record's overhead in `bytes` and `cap_bytes`, beside `data`, `meta`, `tag` and `node`.
RECORD_FRAMING_BYTES: Final = 24
# The bytes of a trace before `meta`, mark included; and the number that a trace adds to the kind of
# its record.
TRACEPARENT_BYTES: Final = 55
TRACE_BYTES: Final = 1 + TRACEPARENT_BYTES
TRACED_KIND: Final = 8
# How many seqs are reserved beyond the last ceiling, for every class but fsync (ARCHITECTURE,
# Heads).
HEAD_RESERVE_SEQS: Final = 65_536
# Each reservation is twice the last one, up to this: fast writers rarely wait for one.
HEAD_RESERVE_SEQS_MAX: Final = 64 * HEAD_RESERVE_SEQS
# How many (range, reason) facts of lost records a topic keeps. Beyond that, neighbouring ranges are
# merged with the reason `mixed`.
LOSS_RANGES_MAX: Final = 64
DEDUPE_KEYS_PER_TOPIC_MAX: Final = 1_000_000
# Epochs and seqs of producers stay exact in a double (producer headers).
PRODUCER_NUMBER_MAX: Final = 2**53 - 1
PRODUCER_ID_CHARS_MAX: Final = 256
# A producer that has not appended for this long is forgotten; until then it counts as one of a
# topic's producers.
PRODUCER_KEPT_MS: Final = 7 * 86_400_000
PRODUCERS_PER_TOPIC_MAX: Final = 100_000

# --- journal ------------------------------------------------------------------------------
WAL_SHARDS_MAX: Final = 64
WAL_FILE_BYTES: Final = 64 * MIB
WAL_FILL_STEP_BYTES: Final = 4 * MIB
# A frame holds one call; a group holds the frames of one write.
FRAME_BYTES_MAX: Final = 256 * MIB
GROUP_BYTES_MAX: Final = 8 * MIB
# A group larger than this is written by the shard's thread, never from the loop.
LOOP_WRITE_BYTES_MAX: Final = MIB
# Unsynced bytes above which a write could block on write-back: leave it to the thread.
LOOP_UNSYNCED_BYTES_MAX: Final = 16 * MIB
# Appends are `throttled` while more bytes than this wait in one shard.
SHARD_QUEUE_BYTES_MAX: Final = 256 * MIB

# --- segments and snapshots ---------------------------------------------------------------
# Files stay under 2 GiB; a run is cut long before that.
SEGMENT_DATA_BYTES_MAX: Final = 1536 * MIB
SEGMENT_RECORDS_MAX: Final = 1_048_576
# A run smaller than this is not sealed by age: it stays in the snapshot.
SEAL_BY_AGE_BYTES_MIN: Final = 64 * KIB
SNAPSHOTS_KEPT: Final = 2
CAPTURE_SLICE_MS: Final = 0.5
BLOCK_CACHE_BYTES_MAX: Final = 48 * MIB
OBJECT_CACHE_BYTES_MAX: Final = 16 * MIB

assert SEQ_MAX < U64_MAX
assert DIFF_LIMIT_DEFAULT <= 1000
assert PAGE_BYTES_DEFAULT <= PAGE_BYTES_MAX
assert PAGE_SIZE_DEFAULT <= PAGE_SIZE_MAX
assert BLOCK_RECORDS_MAX <= PAGE_SCAN_SLOTS_MAX <= SEGMENT_RECORDS_MAX
assert 10 * MOVE_RECORDS_MAX < 2**15
assert WAL_FILE_BYTES % WAL_FILL_STEP_BYTES == 0
assert LOOP_WRITE_BYTES_MAX <= GROUP_BYTES_MAX <= FRAME_BYTES_MAX
assert LARGE_APPENDS_WAITING_BYTES_MAX >= FRAME_BYTES_MAX
assert FRAME_BYTES_MAX < SEGMENT_DATA_BYTES_MAX < 2**31
assert SHARD_QUEUE_BYTES_MAX >= FRAME_BYTES_MAX
