"""The verb `topics bench`: how fast a running server is, measured over HTTP as its users call it.

- `bench`: `topics bench`: the options, the output and the verdict.
- `connections`: one HTTP connection with prepared requests, and where it leads.
- `following`: the load of one writer and one reader that waits.
- `loads`: the load of connections that each send a request after the other, and its end.
- `measured`: a row of the result: rates, percentiles and the client's share of a core.
- `own_topics`: the topics of a run: made with a random name, and removed.
- `requests`: the bytes of the requests, and which one comes next.
- `run`: the rows, one after the other.
"""
