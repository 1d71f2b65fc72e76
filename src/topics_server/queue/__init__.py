"""Queues: leases over the records of a topic.

A queue is a topic. Its leases are a projection of the journal beside the topics: `lease_table`
applies lease entries and observes the entries of topics; pure modules hold the rules.

- `dispatch/`: which waiting claimer gets which job.
- `leases/`: which jobs are leased, due or unclaimed.
- `acks`: acks: deletes the jobs that a node completes (§10.4).
- `answers`: the values that the queue service returns.
- `claims`: claims that are answered at once (§10.2).
- `dead_letter`: the record of a dead job, and the job of a dead letter (§10.6, redrive).
- `push`: one push stream (§10.8): keeps up to `max` jobs leased to one connection.
- `service`: the queue service: claim, ack, nack, extend and waiting claims (§10).
- `step_clock`: the wall clock of queues; it detects when the clock is set.
"""
