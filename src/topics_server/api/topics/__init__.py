"""Routes of topics (§1).

- `config_requests`: merge patches of a configuration, and unknown members of a body.
- `handlers`: topic routes: PUT, PATCH, state, list, DELETE (§1).
"""
