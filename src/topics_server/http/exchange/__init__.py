"""One request and its answer on a connection, and the state of the connection meanwhile.

- `asgi_exchange`: one request that an ASGI application answers.
- `body_uploads`: counts a connection's request bodies in the upload budget, and reads them in
  turns.
- `connection_end`: a connection's last answer, and the bytes that it receives after it.
- `deadlines`: the deadlines of a connection: head, body, and unread answer.
- `door`: the services that the application offers its own connections beyond ASGI.
- `flow_control`: controls when a connection reads, and tracks room in its write buffer.
- `joined_writes`: a transport that sends head and body in one piece.
- `known_heads`: heads that were parsed before, with the direct calls for them.
- `pings`: pings that check whether the peer of a WebSocket is still there.
- `request_reader`: parses a connection's bytes into requests, and refuses ambiguous framing.
- `response_head`: the bytes of a response's head.
- `scopes`: the ASGI scopes of requests and WebSockets.
"""
