"""The running store: its start, its parts and its stop.

- `archiver`: keeps the continuous archive of the running store.
- `backups`: backups of the running store, one at a time.
- `ground`: the locked directory and everything else that exists before recovery.
- `mending`: fetches whole copies of damaged segments from the archive.
- `boot`: recovers the store, opens its journal and wires its services into a `Node`.
- `node`: the complete running store: its parts, its facts, its stop.
"""
