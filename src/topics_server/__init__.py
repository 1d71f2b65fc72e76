"""A durable event log behind plain HTTP; this package is the server and its command line.

Imports point downwards; `tests/layers.py` holds the table and `docs/ARCHITECTURE.md` the picture.
This file imports nothing, so that a tool can load one format module without the server.

- `api/`: HTTP routes over the engine and its services. The rules of topics are in `engine/`.
- `archive/`: backups: copies a store into a folder and back.
- `auth/`: access control: keys, tickets, origins, hosts, and the limit on concurrent requests.
- `cli/`: the command `topics`: one module for each verb, imported when the verb runs.
- `client/`: a client of the server: topics, queues and their workers, live events, views and
  streams.
- `engine/`: topics: one write path, one apply path, one read path, no lock.
- `http/`: the wire: request heads, timeouts, upload budget, responses. Does not depend on topics.
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
