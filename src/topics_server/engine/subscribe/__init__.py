"""Readers that follow topics.

- `creations`: readers that wait for topics that do not exist yet, by name and by prefix.
- `cursors`: a reader's position in one incarnation of a topic.
- `dispatcher`: wakes readers of many topics and reads their next batch.
- `durable_heads`: how far topics are synced, for `consistency: strong` (§7.2).
- `session_service`: opens, finds, follows, expires and journals watch sessions.
- `sessions`: watch sessions: topics and positions, connected or not (§7.1).
- `subscription`: what one reader of a topic receives next.
- `tag_watchers`: filtered readers at the head of a topic, found by the tags that they wait for.
"""
