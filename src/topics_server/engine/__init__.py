"""Topics and what happens to them: one write path, one apply path, one read path, and no lock.

All state here belongs to the event-loop thread. A command is *decided* against visible and staged
state into an entry, the entry goes through the ports to the journal, and when its gate is met it is
*applied*; recovery applies the same entries again. This package never imports `wal`: `ports` names
what it needs of the disk.

- `log`, `reading`, `tags` — the records of a topic and how a page of them is read
- `retention`, `dedupe`, `producers`, `staging` — the rules an append meets
- `topic`, `registry`, `priority` — one topic; all of them; how hard each may be written
- `hub`, `subscription` — bells and cursors, for whoever waits
- `ports`, `commits` — what the disk promises; tickets and the only caller of `apply`
- `store` — the front the services call; `sealing`, `sealer`, `checkpointer`, `recovery` — what runs
  behind it
"""
