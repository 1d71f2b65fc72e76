"""Routes of materialized views.

- `handlers`: PUT, state, list, DELETE, rebuild, stats, queries.
- `live`: a live query: sends the rows again whenever they change.
- `requests`: request shapes.
- `responses`: answers as JSON bytes.
"""
