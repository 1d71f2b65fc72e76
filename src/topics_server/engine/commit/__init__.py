"""Takes a decided entry to applied state, and notifies readers.

- `gates`: what each entry waits for before it is applied and acknowledged.
- `pending_names`: waits for a pending create, configure or drop of a name.
- `notifier`: notifies listeners that a topic changed; listeners read from their cursor.
- `pipeline`: tickets: takes a decided entry to applied state; the only caller of `apply`.
- `projections`: journaled state beside topics: its interface for commit and recovery.
- `repeats`: answers a repeated append with the original's result.
- `router_pages`: router pages in flight; a snapshot capture waits for them.
- `ticket_waits`: the ways to wait for a ticket: a future, a task that raises its error, a callback.
- `topic_waits`: waits for a topic's change; a few of them end in each turn of the loop.
- `transfers`: transfers of records between topics: second half and crash recovery.
"""
