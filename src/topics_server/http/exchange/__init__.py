"""One request and its answer on a connection, and what a connection notes while they pass.

- `asgi_exchange`: one request that an ASGI application answers.
- `body_uploads`: the request bodies of one connection in the upload budget and in the upload turns.
- `connection_end`: a connection's last answer, and what it still receives behind it.
- `deadlines`: what a client has kept a connection waiting for.
- `door`: what an application of ours offers its connections beyond ASGI.
- `flow_control`: when a connection reads, and whether its write buffer has room.
- `joined_writes`: a transport that sends head and body in one piece.
- `known_heads`: heads that were parsed before, and what the door found for them.
- `pings`: pings that find out whether the peer of a WebSocket is still there.
- `request_reader`: reads requests out of a connection's bytes, and refuses ambiguous framing.
- `response_head`: the bytes of a response's head.
- `scopes`: what ASGI tells an application of a request or of a WebSocket.
"""
