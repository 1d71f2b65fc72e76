"""Following topics: `live`, with and without an event loop.

- `async_live`: `live_async`: the events of topics, for coroutines.
- `blocking_live`: `live`: the events of topics, as an iterator.
- `live_events`: the events of a live stream as values, and the request for the next stream.
"""
