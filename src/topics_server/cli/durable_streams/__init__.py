"""Verbs on Durable Streams.

- `stream`: `topics stream`: create, append, read, follow, close, rm of streams.
- `stream_calls`: requests to one Durable Stream, and their responses.
- `stream_following`: follows a Durable Stream to its end across disconnects.
"""
