"""The verb `topics torture`: a server under kills and a full disk, on the user's own disk.

- `acknowledged`: what the server has acknowledged of one topic, and whether a reader finds it.
- `cycles`: the run: kills, checks, the full disk.
- `own_folder`: the folder of a run: refused unless it is empty, and cleaned up.
- `sync_times`: how long syncs take, and which times no device has.
- `torture`: `topics torture`: the options and the verdict.
- `writers`: the threads that append until the server dies.
"""
