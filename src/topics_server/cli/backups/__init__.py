"""Verbs on backups.

- `backup`: `topics backup`: a backup of a running server, or of a stopped one's directory.
- `backups`: `topics backups`: ls, verify and prune of a backup folder.
- `restore`: `topics restore FOLDER DIR`: makes a data directory from a backup.
"""
