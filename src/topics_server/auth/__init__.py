"""Access control: keys, tickets, origins, hosts, and the limit on concurrent requests.

- `api_keys`: API keys: the rights of a caller, and the search for the key of a token.
- `authorize`: decides whether a caller has the rights for a request: 401 and 403 (§0.2).
- `concurrency_limit`: limits how many requests of one key run at once (§11).
- `hosts`: decides which `Host` names a request may use (DNS rebinding rule).
- `origin`: decides from which web pages a browser may call this server (CSRF rule).
- `live_tickets`: signed tickets that open one live stream without a key until they expire.
- `tickets`: single-use tickets that open one watch session's stream without a key.
"""
