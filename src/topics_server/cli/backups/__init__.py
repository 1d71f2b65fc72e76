"""Verbs on backups.

- `archive`: `topics archive`: ls, verify and prune of a continuous archive.
- `backup`: `topics backup`: a backup of a running server, or of a stopped one's directory.
- `backups`: `topics backups`: ls, verify and prune of a backup folder.
- `restore`: `topics restore`: makes a data directory from a backup or a moment of an archive.
"""
