"""Verbs on backups.

- `archive`: `topics archive`: ls, verify, drill, prune, unlock of a continuous archive.
- `archive_source`: opens the archive at a URL, and reads the options that name a moment.
- `backup`: `topics backup`: makes a backup of a running server, or of a stopped server's directory.
- `backups`: `topics backups`: ls, verify, drill and prune of a backup folder.
- `drill`: `topics backups drill`, `topics archive drill`: try a restore in a scratch folder.
- `restore`: `topics restore`: makes a data directory from a backup or a moment of an archive.
"""
