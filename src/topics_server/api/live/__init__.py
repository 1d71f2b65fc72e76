"""Event streams in one step: `GET …/live`, without a session.

- `handlers`: the live routes, and the tickets for them.
- `positions`: where a stream begins in each topic: at its request's start, or at an event id.
- `requests`: reads the query of a live stream: topics, prefixes, a start, filters.
- `stream`: one live stream: its topics, topics that are created later, and its ids.
"""
