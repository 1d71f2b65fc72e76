"""The page at `/`, for a browser and for curl.

Like the probes, it needs no key: it shows nothing that is not in this repository. Called through
the route table in `api/routes`.
"""

from __future__ import annotations

import html
import re
from typing import Final

from topics_server.api.context import ServerState
from topics_server.api.operate.version import server_version
from topics_server.api.request import Request, Response

_HTML: Final = b"text/html; charset=utf-8"
_TEXT: Final = b"text/plain; charset=utf-8"
_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
        b"form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept"),
)
# A valid host name: the page repeats the name in `Host` only if it has this form.
_HOST: Final = re.compile(rb"[A-Za-z0-9.:\[\]-]{1,255}")
_ABOUT: Final = "An event store behind plain HTTP: append, read from any position, delete by tag."
# The first commands of the README.
_LINES: Final = (
    """curl --json '{"records":[{"data":{"id":7},"tag":"order-7"}]}' %s/v0/topics/orders""",
    """curl --json '{"from_seq":0}' %s/v0/topics/orders/diff""",
    """curl --json '{"match":"order-7"}' %s/v0/topics/orders/delete""",
    """curl %s/v0/topics/orders""",
    """curl %s/v0/topics""",
)
_LINKS: Final = (
    ("console", "Console: see topics and act on them"),
    ("v0/docs", "Reference: every route, to read and to try"),
    ("v0/openapi.json", "The same as an OpenAPI document"),
    ("v0/health", "Health"),
    ("v0/ready", "Readiness"),
    ("v0/metrics", "Metrics for Prometheus"),
)
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>topics-server</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 1rem/1.5 system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 3rem auto; padding: 0 1rem }}
pre {{ overflow-x: auto; padding: .75rem; border: 1px solid #8886; border-radius: .4rem }}
</style>
</head>
<body>
<h1>topics-server {version}</h1>
<p>{about}</p>
<h2>Try it</h2>
{lines}
<h2>Next steps</h2>
<ul>
{links}
</ul>
</body>
</html>
"""


def page(_state: ServerState, request: Request) -> Response:
    """`GET /`: HTML if `Accept` names it, else text."""
    accept = request.headers.get(b"accept", b"").lower()
    host = request.headers.get(b"host", b"")
    origin = "http://" + (host.decode() if _HOST.fullmatch(host) else "localhost:4000")
    origin += request.prefix.decode("latin-1")
    if b"text/html" in accept:
        return Response(200, _as_html(origin), _HEADERS, _HTML)
    return Response(200, _as_text(origin), _HEADERS, _TEXT)


def _as_text(origin: str) -> bytes:
    lines = "\n".join("    " + line % origin for line in _LINES)
    links = "\n".join(f"    {origin}/{path:<16} {about}" for path, about in _LINKS)
    return f"topics-server {server_version()}\n{_ABOUT}\n\n{lines}\n\n{links}\n".encode()


def _as_html(origin: str) -> bytes:
    lines = "\n".join(f"<pre>{html.escape(line % origin)}</pre>" for line in _LINES)
    links = "\n".join(f'<li><a href="{path}">{about}</a></li>' for path, about in _LINKS)
    return _PAGE.format(version=server_version(), about=_ABOUT, lines=lines, links=links).encode()
