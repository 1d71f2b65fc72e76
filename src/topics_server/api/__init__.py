"""HTTP routes over the engine and its services. The rules of topics are in `engine/`.

Handlers raise `TopicsError` for a refusal; `http.error_responses` turns it into status, headers and
body.

- `consumers/`: routes of consumers: named, durable cursors.
- `live/`: event streams in one step: `GET …/live`, without a session.
- `messages/`: request and response shapes that several routes share.
- `openapi/`: the OpenAPI document of all routes.
- `operate/`: routes for operators: probes, metrics, admin, front page, console, reference.
- `queues/`: routes of queues (§10).
- `records/`: routes of records: append, diff, delete (§2, §3, §5).
- `routers/`: routes of routers (§6).
- `streams/`: routes of Durable Streams (`/v1/stream`).
- `topics/`: routes of topics (§1).
- `views/`: routes of materialized views.
- `watch/`: watch sessions over server-sent events (§7), and the delivery all streams share.
- `websocket/`: the WebSocket route (§7).
- `access_log`: per-route metrics and the access log line of every response.
- `api_settings`: the settings that handlers read.
- `application`: the application: Starlette over the table of routes.
- `context`: what every handler gets: settings, store, services, server phase.
- `direct`: the direct path: hot routes answered from the parser's callback, without a task.
- `front_door`: the checks and limits that every request passes, under any ASGI server.
- `readiness`: readiness and slots for streams, checked before a handler runs.
- `request`: the input and the output of a handler: one `Request`, one answer.
- `request_body`: reads and inflates request bodies within their limits.
- `routes`: the route table: which handler answers which method and path (§9).
- `routing`: routes: the methods of a route, and the search for the route of a path.
- `waiting_turn`: a request that waits for its turn under pressure.
"""
