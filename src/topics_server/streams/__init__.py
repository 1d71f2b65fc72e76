"""Durable Streams over topics: one log, two doors.

A stream is a topic (the contract's README, *Bytes in topics*): a JSON message is a record, and so
is one append of bytes. What a stream is beside its topic (content type, lifetime, closed or not,
what it was forked from) are `model.StreamFacts`, durable with the topic.

- `values`: what the door at `/v1/stream` asks for and is told
- `paths`: stream path -> topic name
- `offsets`: positions as text
- `forks`: whose path may not be used again
- `service`: the calls: create, append, close, read, wait, delete
- `lifetimes`: streams end by themselves
"""
