"""Request and response shapes that several routes share.

- `accept`: reads `Accept`: the weight that a client gives to each media type.
- `bounded_lists`: bounds lists and names in request bodies before decoding builds them.
- `conditions`: reads the condition of a write: `if` of its body, or `If-Match`.
- `filters`: reads the filter of a read: JSON to a tree of `engine/filters`.
- `path_names`: decodes the topic, router or stream name in a request path.
- `producer_headers`: reads and writes the producer headers of a request.
- `read_queries`: the numbers and filters in the queries of plain reads and live streams.
- `requests`: request shapes shared by routes: configuration, diff, delete, list cursors.
- `responses`: renders the responses of topics and routers as JSON bytes.
- `times`: reads a point in time: milliseconds, RFC 3339, or a duration before now.
- `trace_headers`: reads the `traceparent` of a request.
- `visibility`: hides topics and routers that a key's prefixes do not cover.
"""
