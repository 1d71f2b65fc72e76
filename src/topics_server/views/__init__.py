"""Materialized views: tables that follow a topic, in SQL, with read-your-writes.

- `answers`: the values that the view service takes and returns.
- `build`: brings one file of a view up to the head of its topic, and keeps it there.
- `definition`: checks a view definition before anything runs it.
- `feed`: the pages, messages and pauses that views at the heads of their topics share.
- `judge`: removes files with lost records of their topics, before the server is ready.
- `messages`: the messages between the server and its view processes.
- `pacing`: the size of a batch, and the pause of a view between two batches.
- `pieces`: encodes the records of a page for the apply process.
- `processes`: the server's side of the helper processes of views.
- `service`: the view service: define, query, follow, rebuild, delete.
- `shortcuts`: expands the shortcuts of a definition to SQL.
- `view`: one view: the file that answers, the file that is being built, the waiting queries.
- `view_table`: all views: a projection of the journal.
- `workers/`: the code of the helper processes.
"""
