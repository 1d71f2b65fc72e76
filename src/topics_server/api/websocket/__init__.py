"""The WebSocket route (§7).

- `commands`: decodes a client's WebSocket message into a command.
- `frames`: renders WebSocket events and answers as JSON messages.
- `handlers`: `GET /v0/ws`: publish and follow topics over one WebSocket (§7).
- `prefixes`: the prefixes that one socket follows, with their existing topics and those made later.
"""
