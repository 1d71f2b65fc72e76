"""Routers: server-side forwarding from one topic into another (§6).

`table` what routers there are, a projection of the journal · `forward` the copies of a page, pure ·
`evidence` which copies a destination holds already · `pump` reads sources and appends to
destinations · `routes` what each router at work waits for · `service` put, get, list, delete ·
`answers` what comes back.
"""
