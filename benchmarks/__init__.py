"""Benchmarks: compare our server with a floor, in one run, in interleaved rounds.

Run with `./run bench` (or `python -m benchmarks`); docs/PERFORMANCE.md lists the measurements and
their reasons. The map:

- `__main__` reads the arguments, runs the cases, writes JSON, chart and document;
- `check` compares a short run with the kept ratios to the floor (`./run bench-check`, in CI);
- `bench` has the tools of a case: options, scratch folder, load generator, interleaved rounds;
- `report/`: `figures` are results and bars as plain values; `chart`, `document` and `terminal` show
  them; `overview` chooses twelve rows for the README and docs/PERFORMANCE.md; `machine` describes
  the machine and measures its noise and its disk; `floor_ratios` is the file of kept ratios;
- `clients/`: `load` generates load in its own process, and `loader` controls that process;
  `watchers` is the watching client (many streams and their writer), `watching` controls it;
  `workers` is the queue client (enqueues, claims, acks), `queue_wires` and `postgres_queue` have
  its protocols, `working` controls it; `postgres` is PostgreSQL's protocol; `crowd` is a client of
  more writers than a server can accept; `requests` builds bytes;
- `servers/`: `floor` is the bare ASGI application of all comparisons, `fanout_floor` the bare loop
  for fan-out; `server` starts our server, `plain_server` starts it without the parts for
  operation, `peers` starts redis, NATS and PostgreSQL; `process` starts and ends processes and
  reads the kernel's counters;
- `cases/` has one file for each group of benchmarks.
"""
