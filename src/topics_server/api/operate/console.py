"""The console at `/console`: a page to look at topics and to act on them.

Its files lie in the folder `console` of the package and need no build. The page calls the routes
below `/v0` with the key that its user types in, so it can do only what that key allows. The content
policy lets it load from and call this server only. Like the probes, the files need no key: they
show nothing that is not in this repository. Called through the route table in `api/routes`.
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Final

from topics_server.api.context import ServerState
from topics_server.api.request import Request, Response
from topics_server.values.errors import Code, TopicsError

_FOLDER: Final = Path(__file__).parents[2] / "console"
_PAGE: Final = "console.html"
_KINDS: Final = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# Files that the page loads. A name in a URL is looked up in this list before it is joined to a
# path.
FILES: Final = (
    "api.js",
    "console.css",
    "consumers.js",
    "dom.js",
    "icon.svg",
    "operate.js",
    "queues.js",
    "records.js",
    "start.js",
    "topics.js",
    "views.js",
)
_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        b"require-trusted-types-for 'script'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


async def page(_state: ServerState, _request: Request) -> Response:
    """`GET /console`."""
    return await _response(_PAGE)


async def file(_state: ServerState, request: Request) -> Response:
    """`GET /console/static/{file}`: a file that the page loads."""
    if request.name not in FILES:
        raise TopicsError(Code.NOT_FOUND, "the console has no such file")
    return await _response(request.name)


async def _response(name: str) -> Response:
    content = await asyncio.to_thread(_content, name)
    return Response(200, content, _HEADERS, _KINDS[Path(name).suffix])


@cache
def _content(name: str) -> bytes:
    """*Blocking.* A file of the console, read once."""
    return (_FOLDER / name).read_bytes()
