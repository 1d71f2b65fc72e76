"""Topics: one write path, one apply path, one read path, no lock.

The event-loop thread owns all state here. `decide` checks a command against visible and staged
state and makes an entry; the entry goes through the ports to the journal; when its gate is met,
`apply` changes the state. Recovery applies the same entries again. This package never imports
`wal`: `ports` declares what it needs from the disk.

- `background/`: work behind the requests: sealing, checkpoints, recovery, large appends.
- `commit/`: from a decided entry to applied state, and the notification of readers.
- `log/`: the records of one topic in memory.
- `pressure/`: the throttle: which requests wait and which are refused.
- `read/`: pages of records and topic states.
- `subscribe/`: readers that follow topics.
- `topic/`: one topic and the registry of all: every rule that a write must pass.
- `answers`: the values that the store returns to its callers.
- `appends`: appends: one call makes one entry and one ticket.
- `conditions`: waits for what a conditional write needs, then decides it again.
- `consumers`: named, durable cursors of readers.
- `deletes`: deletes by seq and tag, or of exact seqs.
- `filters`: filters on the tag and the node of a record.
- `ports`: the protocols of what the engine needs: journal, segments, snapshots, clock.
- `preconditions`: the conditions that a write must meet before it is decided.
- `reads`: reads: one page after a cursor.
- `store`: the calls of the API and of the services, under one name.
- `stream_writes`: stream operations beside appends: create, fork, close, touch.
- `topic_admin`: creates, configures, drops, lists and shows topics.
"""
