"""Routes of queues (§10).

- `handlers`: queue routes (§10): claim, ack, nack, extend, push stream, leases, redrive.
- `requests`: request shapes of queue routes (§10).
- `responses`: responses and stream frames of queue routes (§10).
"""
