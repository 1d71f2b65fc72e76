"""Verbs on views.

- `definition_file`: reads a view definition from an SQL file with front matter.
- `view`: `topics view`: put, get, ls, query, watch, rebuild and rm of views.
"""
