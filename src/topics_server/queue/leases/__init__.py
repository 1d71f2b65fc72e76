"""Tracks which jobs are leased, due or unclaimed.

- `fair_share`: divides available jobs among several claimers (§10.2).
- `gone`: deleted jobs that are still in a book.
- `held_jobs`: the jobs of a lease book by seq; jobs that one claim leased share one value.
- `holders`: finds the jobs that a node holds, by lease ids.
- `jobs`: a leased job, and the values that a lease book returns.
- `kept_jobs`: the jobs of one queue in a book, and the removal of deleted ones.
- `lease_book`: one queue's leases: holder, deadline, next job, delivery count.
- `lease_log`: the lease log of a queue, appended to an ordinary topic.
- `lease_parts`: encodes one queue's leases as snapshot parts, and back.
- `lease_table`: the leases of all queues: a projection of the journal.
- `rubbish`: frees deleted jobs a few at a time.
- `timers`: jobs of one queue by time: delayed ones and returned ones.
- `unclaimed`: jobs of one queue that nobody has claimed yet.
"""
