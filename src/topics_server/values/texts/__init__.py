"""Decodes texts that people write in settings, options and URLs. Pure.

- `amounts`: durations and sizes as people write them: `5s`, `64KB`.
- `archive_url`: the URL of an archive: which kind of store, and where in it.
- `host_names`: brings host names, and lists of them, into one normal form.
- `key_list`: the text form of API keys: a secret, its scopes and its prefixes.
- `query_string`: decodes the query string of a request.
"""
