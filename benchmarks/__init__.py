"""Benchmarks: our server beside a floor, in one run, in interleaved rounds.

Run with `./run bench` (or `python -m benchmarks`); docs/PERFORMANCE.md lists the measurements and
their reasons. The map:

- `__main__` reads the arguments, runs the cases, writes JSON, chart and document;
- `bench` has the tools of a case: options, scratch folder, load generator, interleaved rounds;
- `report/`: `figures` are results and bars as plain values; `chart`, `document` and `terminal` show
  them; `overview` chooses twelve rows for the README and docs/PERFORMANCE.md; `machine` describes
  the machine and measures its noise and its disk;
- `clients/`: `load` generates load in a process of its own, and `loader` talks to that process;
  `watchers` is the watching client (many streams and their writer), `watching` talks to it;
  `workers` is the queue client (enqueues, claims, acks), `queue_wires` and `postgres_queue` have
  its protocols, `working` talks to it; `postgres` is PostgreSQL's protocol; `crowd` is more writers
  than a server can accept; `requests` builds bytes;
- `servers/`: `floor` is the bare ASGI application of all comparisons, `fanout_floor` the bare loop
  for fan-out; `server` starts ours, `plain_server` ours without the parts of operation, `peers`
  starts redis, NATS and PostgreSQL; `process` starts and ends processes and reads the kernel's
  counters;
- `cases/` has one file for each group of benchmarks.
"""
