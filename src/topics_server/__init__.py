"""A durable event log behind plain HTTP; this package is the server and its command line.

Imports point downwards; `tests/layers.py` holds the table and `docs/ARCHITECTURE.md` the picture.
Nothing is imported here, so that a tool may load one format module without loading the server.

- `api/`: HTTP routes over the engine and its services. No rule of topics lives here.
- `archive/`: backups: copies a store into a folder and back.
- `auth/`: access control: keys, tickets, origins, hosts, and the limit on concurrent requests.
- `cli/`: the command `topics`: one module a verb, imported when the verb runs.
- `client/`: a client: enqueue and work jobs, write to topics and streams, each record once.
- `engine/`: topics: one write path, one apply path, one read path, no lock.
- `http/`: the wire: request heads, timeouts, upload budget, responses. Knows no topic.
- `queue/`: queues: leases over the records of a topic.
- `routers/`: routers: server-side forwarding from one topic into another (§6).
- `runtime/`: the clock, metrics, logging and other services of the process.
- `settings/`: the environment, read once into one frozen `Settings`.
- `streams/`: Durable Streams: every topic is also a stream under `/v1/stream`.
- `views/`: materialized views: tables that follow a topic, in SQL, with read-your-writes.
- `values/`: leaves: values, formats of records, limits and errors. No module here does I/O.
- `wal/`: files and disks: the only package that opens, writes, syncs and renames.
- `__main__`: the entry point of the command `topics` and of `python -m topics_server VERB …`.
- `app`: the store as an ASGI application, for a server or an application of your own.
- `node/`: the running store: opens and recovers it, serves it, closes it.
- `server`: the process: listening sockets, the event loop, signals and the exit code.
- `testing`: fixtures for pytest: a real server for the tests of an application.
"""
