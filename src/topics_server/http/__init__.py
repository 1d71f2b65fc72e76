"""The wire: request heads, timeouts, upload budget, responses. Does not depend on topics.

- `exchange/`: one request and its answer on a connection.
- `connection`: one HTTP/1.1 connection: bytes in, requests to the application, answers out.
- `content_encoding`: content types and encodings: gzip in and out.
- `cors`: CORS headers for the listed origins.
- `error_responses`: the table from error codes to HTTP status, headers and envelope (§0.5, §0.6).
- `read_scheduler`: defers connections with much input, so that no loop turn is long.
- `request_head`: the checks of a request's head that the parser does not make.
- `request_ids`: the request id: the client's own, or a new unique one.
- `responses`: a response of known length.
- `sockets`: the connection calls that a stream needs beyond ASGI `send`.
- `timeouts`: connection timeouts and the limit on connections.
- `upload_budget`: the memory budget for request bodies being received.
- `upload_turns`: reads connections with large uploads in turns, a few at a time.
- `websocket`: one WebSocket connection over websockets' Sans-I/O protocol.
"""
