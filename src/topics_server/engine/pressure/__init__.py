"""The throttle: who waits, who is refused.

- `fair_share`: picks the waiting topic that was served longest ago.
- `priority`: a topic's priority: manual, or fading with its last read.
- `throttle`: the throttle (§0.6): under pressure requests wait by priority or get 429.
- `wait_queue`: requests that wait for a turn under pressure.
"""
