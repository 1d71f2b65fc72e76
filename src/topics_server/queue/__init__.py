"""Queues: leases over the records of a topic. A queue is a topic; what is leased is kept here.

Who holds which job until when is a projection of the journal beside the topics: `books` applies
lease entries and hears what happens to the topics, and the pure modules know the rules.

- the pure core: `leases` (one queue's book: claim, ack, nack, extend, expiry), made of `jobs`
  (one job, and the answers), `waiting` (jobs by the time they are due) and `fresh` (jobs never
  handed out); `cohort` (a fair division);
  `dead_letter` (the record a dead job becomes, and the way back)
- time: `step_clock` (the wall clock; setting it moves the books), `alarm` (one timer)
- all of them: `books` (the projection), `lease_parts` (one book as parts of a snapshot)
"""
