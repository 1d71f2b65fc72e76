"""Routers: server-side forwarding from one topic into another (§6).

- `copy_dedupe`: which copies a destination already holds (`exactly_once`, §6).
- `fetches`: reads sealed blocks for the next pages of routers.
- `forward`: computes one router's copies of a source page: filter, hops, dedupe.
- `pump`: reads sources from the routers' cursors and appends copies.
- `router_table`: all routers: a projection of the journal with the graph's rules (§6).
- `routes`: the running state of each router and each source.
- `service`: the router service: put, get, list, delete (§6).
"""
