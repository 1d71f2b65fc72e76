"""A durable event log behind plain HTTP; this package is the server and its command line.

Map, from the inside out (the arrows of import point inward; `tests/test_tidy.py` holds them):

- leaves: `limits`, `errors`, `model`, `appends`, `entries`, `blocks`, `handoff`, `rendered` —
  values and rules without I/O, clock or event loop; `clock`, `metrics`, `settings` — the only
  places for what they name
- `engine` — topics, the write path, the apply path and the read path; state of the event loop
- `wal` — files: the journal, sealed segments, snapshots, and the faults of disks
- `api` — HTTP on top of the engine
- `node` — storage and engine of one data directory, wired: open, recover, serve, close
- `server` — the process around a node: socket, signals, logging, exit code
- `cli` — the `topics` command; its verb `serve` runs `server`

Nothing is imported here, so that a tool may load one format module without loading the server.
"""
