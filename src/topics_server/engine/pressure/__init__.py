"""The throttle: decides which requests wait and which are refused.

- `body_turns`: spaces out the decoding of request bodies, so that no loop turn decodes many.
- `fair_share`: picks the waiting topic that was served longest ago.
- `priority`: a topic's priority: manual, or fading with its last read.
- `throttle`: the throttle (§0.6): under pressure requests wait by priority or get 429.
- `wait_queue`: requests that wait for a turn under pressure.
"""
