"""Offline tools: dump, verify, repair.

- `begin_anew`: `topics repair --begin-anew` and `--adopt-cold`.
- `dump`: `topics dump` and `verify`: reads a data directory, changes nothing.
- `end_mark_repair`: end marks for `topics repair`: the facts that intact ones prove.
- `offline_inventory`: recovery's judgement of sealed files, offline.
- `repair`: makes a damaged journal readable again and reports the losses.
- `sealed_repair`: reads sealed segments for `topics repair`, and makes damaged indexes again.
- `set_aside`: keeps bytes that `topics repair` gives up, with a report.
- `verify`: checks a data directory at rest: segments, manifests, snapshots, journal.
"""
