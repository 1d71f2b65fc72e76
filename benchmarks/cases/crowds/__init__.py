"""The cost of many clients at once for another client.

- `throttle`: appends at three times the load that the server can take.
- `uploads`: large uploads of one key that begin and stall.
"""
