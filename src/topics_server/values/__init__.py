"""Leaves: values, formats of records, limits and errors. No module here does I/O.

- `appends`: decodes the body of an append into records, and checks the configurable limits (§2).
- `blocks`: a block: an immutable run of consecutive records, stored in columns.
- `columns/`: work on whole columns of records at once, by numpy and `struct`.
- `copies`: decodes a router's copies, live, in replay and in an offline dump.
- `entries`: the journal's entry types: every durable fact of the server.
- `errors`: the two families of errors: errors of requests and damage of storage.
- `file_inventory`: compares a topic's files at start with what is expected of them.
- `json_cache`: caches the rendered JSON of a block's records and slices it.
- `json_shape`: measures the depth and size of JSON without decoding it.
- `limits`: every hard limit of the server, and the relations between limits.
- `model`: shared values: topic configuration, gates, tag matches, names, losses.
- `record_codecs`: the body formats of an append: JSON records, stream bodies, router copies.
- `router_answers`: the values that the router service takes and returns.
- `storage_types`: values that engine and storage exchange beside entries and blocks.
- `texts/`: texts that people write, in settings, options and URLs, as values.
"""
