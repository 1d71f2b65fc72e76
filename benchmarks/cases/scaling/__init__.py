"""Scaling: the server's CPU time for one unit, and the p50, over the size of one thing at a time.

- `tools`: sizes, slices and rounds of an axis.
- `topics`: appends with more topics.
- `records`: appends and reads with more records in the topic.
- `watchers`: deliveries with more watchers of the topic.
- `connections`: appends on more connections, over both APIs.
- `payload`: appends and reads of larger records.
- `depth`: claims and acks with more jobs in the queue.
- `case`: all of them.
"""
