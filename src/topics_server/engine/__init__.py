"""Topics and what happens to them: one write path, one apply path, one read path, and no lock.

All state here belongs to the event-loop thread. A command is *decided* against visible and staged
state into an entry, the entry goes through the ports to the journal, and when its gate is met it is
*applied*; recovery applies the same entries again. This package never imports `wal`: `ports` names
what it needs of the disk.

- one topic's records: `log` (slots), `runs` (its three kinds), `losses` (why ranges are gone),
  `tags`, `reading` (a page of them)
- the rules a write meets: `admission` (limits), `dedupe` (keys), `retention` (caps, TTL),
  `deletion` (which seqs a delete hits), `staging` (decided, not applied yet)
- `topic` — one topic made of these; `registry` — all of them; `priority` — how interesting one is
- `ports` — what the disk promises; `commits` — tickets, and the only caller of `apply`
- `store` — the front that services call; `answers` (what it returns), `fetching` and `blockcache`
  (payloads of sealed records), `hub` (bells, for whoever waits)
- behind it: `sealing` (what is due) and `sealer` (doing it); `capture`, `epochs` (a topic as bytes)
  and `checkpointer`; `recovery` (the way back)
"""
