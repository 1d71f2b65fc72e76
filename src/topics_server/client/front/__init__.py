"""One client of a server: `Client`, and its twin for coroutines `AsyncClient`.

Both have the same methods. They use the other modules of the client for every request, retry and
stream.

- `admin_calls`: requests on topics as values: list, configure, drop, delete records.
- `async_client`: `AsyncClient`: one server, for coroutines; `AsyncConsumer`.
- `client`: `Client`: one server, without an event loop; `Consumer`.
- `cursors`: where a reader's position is stored, and when it is saved.
- `event_reader`: the items of a live stream's events.
- `items`: the items that readers get: records, gaps, and news of topics.
- `page_reader`: the pages of a read, and their items.
- `plans`: the options of a read and of a live stream, checked.
"""
