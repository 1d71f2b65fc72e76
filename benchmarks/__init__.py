"""Benchmarks: our server beside a floor, in one run, in interleaved rounds.

Run with `./run bench` (or `python -m benchmarks`); docs/PERFORMANCE.md says what is measured and
why. The map:

- `__main__` reads the arguments, runs the cases, writes JSON, chart and document;
- `bench` is what a case is given: options, scratch folder, load generator, interleaved rounds;
- `figures` are results and bars as plain values; `chart`, `document` and `terminal` show them;
- `load` generates load, in a process of its own; `loader` talks to that process;
- `watchers` is the watching client, one process too: many streams and who writes to them;
  `watching` talks to it;
- `workers` is the queue client, one process too: enqueues, claims, acks; `queue_wires` are the
  protocols it speaks, `working` talks to it;
- `floor` is the bare ASGI application everything is compared with, `fanout_floor` the bare loop
  fan-out is compared with; `server` starts ours, `peers` starts redis and NATS;
- `process` starts and ends processes and reads what the kernel knows of them;
- `machine` describes the machine and measures its noise and its disk;
- `requests` builds request bytes; `cases/` holds one file a group of benchmarks.
"""
