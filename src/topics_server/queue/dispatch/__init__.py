"""Decides which waiting claimer gets which job.

- `alarm`: a timer on the event loop with at most one pending call.
- `consumer_queue`: the claimers that wait on one queue, in turn order.
- `dead_letter_moves`: moves jobs to the dead-letter topic and back (§10.6, redrive).
- `dispatcher`: gives jobs to waiting claimers of all queues.
- `lease_changes`: commits decided lease changes and runs what follows from them.
"""
