"""Durable Streams: create, append, read, follow, close.

- `async_stream`: `AsyncDurableStream`: one stream, for coroutines.
- `durable_stream`: `DurableStream`: the same without an event loop.
- `stream_requests`: requests of a stream as values, and the values of their answers.
"""
