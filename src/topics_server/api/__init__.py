"""HTTP on top of the engine: decoding, rendering, admission, and the route table.

No rule of topics lives here. Refusals arrive as `TopicsError` and become status, headers and body
in `problems` only. The data plane (append, diff, delete, state) is plain functions from request
bytes to response bytes; `http` is the thin adapter that calls them from ASGI.

- `bodies`, `rendering`, `problems` — pure: request shapes, response shapes, the table of errors
- `guard` — admission: readiness, and bodies too large by what they declare
- `http` — requests as values, the adapter; `coding` (gzip in and out), `transport` (a response
  leaves in one piece)
- `topics`, `records`, `probes` — the handlers
- `state` — what every handler is given: settings, store, phase
- `app` — the routes, nothing else; `openapi`, `schemas` and `examples` — the same routes as a
  document
"""
