"""Routes of records: append, diff, delete (§2, §3, §5), and plain reads.

- `find`: plain reads: the records of a topic by `GET`, and one record by its seq.
- `find_requests`: reads the query of `GET …/records`: a range, an order, filters.
- `handlers`: record routes: append (§2), diff with long-polling (§3), delete (§5).
"""
