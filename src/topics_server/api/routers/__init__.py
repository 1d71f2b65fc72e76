"""Routes of routers (§6).

- `handlers`: router routes (§6): PUT, state, list, DELETE.
- `requests`: request shapes of router routes (§6).
"""
