"""Routes of records: append, diff, delete (§2, §3, §5).

- `handlers`: record routes: append (§2), diff with long-polling (§3), delete (§5).
"""
