"""Watch sessions over server-sent events (§7), and the delivery all streams share.

- `auto_acks`: commits the positions of consumers up to the records that a stream's socket took.
- `broadcast`: delivers topic events to many streams, each batch rendered once (§7.6).
- `cursor_ids`: encodes a reader's positions in all its topics as a frame `id` (§7.4).
- `growing`: the topics that match prefixes, also those made later.
- `handlers`: watch routes: `POST /v0/watch` and `GET /v0/watch/{wid}` (§7).
- `requests`: decodes the body of `POST /v0/watch` (§7.2).
- `resuming`: where a session continues behind an event id.
- `send_queue`: the outgoing frames of one connection: in order, one send at a time.
- `starts`: where a subscription begins: at a seq, at the head, at a time, at the last records.
- `stream_timer`: the checks of all streams: heartbeats, and clients that do not read.
- `sse`: the bytes of server-sent events, comments and errors (§7.5).
"""
