"""Materialized views: tables that follow a topic, in SQL, with read-your-writes.

- `answers`: the values that the view service takes and returns.
- `build`: brings one file of a view up to the head of its topic, and keeps it there.
- `definition`: checks a view definition before anything runs it.
- `feed`: pages, messages and pauses that views at the heads of their topics share.
- `judge`: removes files that reflect what their topics lost, before the server is ready.
- `messages`: what the server and its view processes say to each other.
- `pacing`: how many records a batch has, and how long views rest between batches.
- `pieces`: the records of a page as the apply process gets them.
- `processes`: the helper processes of views, seen from the server.
- `service`: the view service: define, query, follow, rebuild, delete.
- `shortcuts`: expands the shortcuts of a definition to SQL.
- `view`: one view: the file that answers, the file that is built beside it, who waits.
- `view_table`: all views: a projection of the journal.
- `workers/`: what runs in the helper processes.
"""
