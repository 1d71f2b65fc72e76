"""Verbs on queues.

- `enqueue`: `topics enqueue`: enqueues one job (§2, §10.1).
- `queue`: `topics queue`: shows queues, once or as a live board (§10.7).
- `queue_board`: the live board of `topics queue`.
- `work`: `topics work`: runs a command for every job of a queue (§10).
"""
