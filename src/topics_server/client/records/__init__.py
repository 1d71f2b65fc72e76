"""Records and consumers of one topic.

- `async_topic`: `AsyncTopicClient`: records and consumers of one topic, for coroutines.
- `topic`: `TopicClient`: records and consumers of one topic, without an event loop.
- `topic_calls`: requests on the records and consumers of a topic as values.
"""
