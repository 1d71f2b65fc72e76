"""Verbs that follow topics.

- `tail`: `topics tail`: prints new records of topics as they arrive (§7).
- `watch`: `topics watch`: prints the frames of a watch stream (§7).
- `watch_stream`: follows topics over server-sent events without loss or repeats (§7).
"""
