"""The verb `topics torture`: tests a server with kills and a full disk, on the user's own disk.

- `acknowledged`: the acknowledged records of one topic, and a check that a reader finds them.
- `cycles`: the run: kills, checks, the full disk.
- `own_folder`: the folder of a run: it must be empty, and is cleaned up.
- `sync_times`: how long syncs take, and which times no device has.
- `torture`: `topics torture`: the options and the verdict.
- `writers`: the threads that append until the server dies.
"""
