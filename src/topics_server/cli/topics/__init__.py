"""Verbs on topics.

- `info`: `topics info`: shows a topic's state and configuration (§1.2).
- `ls`: `topics ls`: lists topics (§1.3).
- `put`: `topics put`: creates a topic or replaces its configuration (§1.1).
- `rm`: `topics rm`: removes a topic with its records (§1.4).
- `set`: `topics set`: changes single fields of a topic's configuration.
"""
