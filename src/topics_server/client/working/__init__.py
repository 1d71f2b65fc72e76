"""Workers of queues.

- `acknowledge`: sends acks and nacks, gathered into few requests.
- `in_flight`: the deliveries that a worker holds, and their lease deadlines.
- `sources`: the source of a worker's jobs: a push stream or polling.
- `threads`: runs plain handlers on threads, outside the event loop.
- `worker`: `@worker`: a function that processes jobs of a queue until stopped.
- `worker_run`: one run of a worker: fetches jobs, runs handlers, extends leases.
"""
