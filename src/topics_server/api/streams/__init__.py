"""Routes of Durable Streams (`/v1/stream`).

- `frames`: server-sent events of a stream: `data`, then `control`.
- `handlers`: Durable Streams routes: PUT, POST, GET, HEAD, DELETE under `/v1/stream`.
- `live_reader`: one live reader of a stream, from its first event to its end.
- `pages`: pages of a stream as HTTP responses: body, ETag, caching, cursor.
- `request_headers`: headers and query parameters of Durable Streams requests.
- `whole_reader`: a catch-up read of several pages in one response.
"""
