"""Durable Streams: every topic is also a stream under `/v1/stream`.

A stream is a topic (the contract's README, *Bytes in topics*): a JSON message is a record, and one
append of bytes is a record. The other facts of a stream (content type, lifetime, whether it is
closed, its fork's origin) are `model.StreamFacts`, durable with the topic.

- `content`: decodes the body of a stream request into records.
- `errors`: the error messages of the Durable Streams API.
- `forks`: forks: a stream that begins as a copy of another.
- `lifetimes`: deletes streams at the end of their TTL or at their expiry time.
- `offsets`: stream offsets as text.
- `paths`: maps a stream's path to a topic's name.
- `positions`: the position in a stream that follows a seq, and comparisons of content types.
- `service`: the stream service: create, append, close, read, wait, delete.
- `values`: the values that the stream service takes and returns.
"""
