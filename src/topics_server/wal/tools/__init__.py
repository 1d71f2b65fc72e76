"""Offline tools: dump, verify, repair.

- `begin_anew`: `topics repair --begin-anew` and `--adopt-cold`.
- `dump`: `topics dump` and `verify`: reads a data directory, changes nothing.
- `end_mark_repair`: end marks for `topics repair`: reads intact ones, writes new ones.
- `offline_inventory`: checks sealed files offline, by the rules of recovery.
- `repair`: makes a damaged journal readable again and reports the losses.
- `sealed_repair`: reads sealed segments for `topics repair`, and makes damaged indexes again.
- `set_aside`: saves the bytes that `topics repair` overwrites, with a report.
- `verify`: checks a data directory at rest: segments, manifests, snapshots, journal.
"""
