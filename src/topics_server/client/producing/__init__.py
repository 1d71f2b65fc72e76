"""Idempotent producers.

- `async_producer`: `AsyncIdempotentProducer`: stores each record once and in order.
- `batches`: a producer's batches: the next batch to send, the meaning of a response.
- `blocking_producer`: `IdempotentProducer`: the producer for threads.
- `receipts`: `Receipt`: the result of one produced record.
- `targets`: the requests of a producer: to a topic of `/v0` or a Durable Stream.
- `transport`: sends a producer's requests on an event loop.
"""
