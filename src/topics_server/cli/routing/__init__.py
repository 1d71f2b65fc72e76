"""Verbs on routers.

- `graph`: draws routers as a tree or as a Graphviz DOT graph.
- `router`: `topics router`: put, get, ls and rm of routers (§6).
- `routers`: `topics routers`: lists routers or draws their graph.
"""
