"""The server's verb, its settings, and the offline tools.

- `child`: a server as a child process, for `demo`, `torture`, drills and fixtures.
- `completion`: `topics completion`: prints the completion script of a shell.
- `config`: `topics config`: shows the settings and their sources, secrets masked.
- `demo`: `topics demo`: runs a server with live example data.
- `doctor`: `topics doctor`: checks settings, disk, limits, clock and proxy.
- `dump`: `topics dump DIR`: prints the records in a data directory, offline.
- `flags`: every server setting as an option, for `serve` and `config`.
- `health`: `topics health`: checks whether a server answers, for health checks.
- `help`: `topics help VERB`: prints the help of a verb.
- `limit_table`: the table of request limits, generated into `docs/LIMITS.md`.
- `repair`: `topics repair DIR`: shows what damage costs and repairs the journal.
- `serve`: `topics serve`: reads the settings, refuses unsafe ones, runs the server.
- `verify`: `topics verify DIR`: checks a data directory offline.
"""
