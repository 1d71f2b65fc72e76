"""What many clients at once cost another one.

- `throttle`: appends at three times the load that the server can take.
- `uploads`: large uploads of one key that begin and stall.
"""
