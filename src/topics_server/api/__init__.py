"""HTTP on top of the engine: decoding, rendering, admission, and the route table.

No rule of topics lives here. Refusals arrive as `TopicsError` and become status, headers and body
in `problems` only. The data plane (append, diff, delete, state) is plain functions from request
bytes to response bytes; `http` is the thin adapter that calls them from ASGI.

- `bodies`, `rendering`, `problems` — pure: request shapes, response shapes, the table of errors
- `guard` — admission: body cap, in-flight cap, readiness
- `http`, `topics`, `records`, `probes` — the handlers
- `app` — routes and middleware order, nothing else
"""
