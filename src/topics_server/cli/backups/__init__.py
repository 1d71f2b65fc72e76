"""Verbs on backups.

- `archive`: `topics archive`: ls, verify and prune of a continuous archive.
- `backup`: `topics backup`: a backup of a running server, or of a stopped one's directory.
- `backups`: `topics backups`: ls, verify, drill and prune of a backup folder.
- `drill`: `topics backups drill`: restores a backup to a scratch folder and compares.
- `restore`: `topics restore`: makes a data directory from a backup or a moment of an archive.
"""
