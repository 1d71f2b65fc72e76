"""Views of topics: define them, query them, follow them.

- `async_view`: `AsyncViewClient`: one view of one server, for coroutines.
- `blocking_view`: `ViewClient`: the same without an event loop.
- `view_calls`: requests of views as values, and the values of their answers.
"""
