"""The API reference: the page at `/v0/docs`, its files, and the OpenAPI document.

The page is Swagger UI, whose files an installed package carries (`swagger-ui-py`; its code is never
imported); it reads `/v0/openapi.json`. The page cannot load or call anything else: the
content policy names this server only. Like the probes, it needs no key: it shows nothing that is
not in this repository. Called through the route table in `api/routes`.
"""

from __future__ import annotations

import asyncio
import importlib.util
from functools import cache
from pathlib import Path
from typing import Final

from topics_server.api.context import ServerState
from topics_server.api.request import Request, Response
from topics_server.values.errors import Code, TopicsError

_HTML: Final = b"text/html; charset=utf-8"
# Files of the package that the page loads, and their content types.
_FILES: Final = {
    "swagger-ui-bundle.js": b"text/javascript; charset=utf-8",
    "swagger-ui.css": b"text/css; charset=utf-8",
    "favicon-32x32.png": b"image/png",
}
_START: Final = "start.js"
# Swagger UI sets styles from its script and has images in its style sheet.
POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    b"img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"max-age=3600"),
)

_PAGE: Final = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>topics: reference</title>
<link rel="icon" type="image/png" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="reference"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
# `validatorUrl` is off: otherwise the page would send the description to a foreign host. `send`
# handles the operations that the page cannot show by itself: it ends an event stream after three
# seconds, and it opens the WebSocket for one ping. The example of a session's id is replaced with
# the id of the last session that the page made.
_SCRIPT: Final = b"""const example = "%s";
let session = example;

async function send(url, request) {
  if (new URL(url, location).pathname.endsWith("/v0/ws")) return ping(url, request);
  const response = await fetch(url, request);
  const media = response.headers.get("content-type") ?? "";
  if (!media.startsWith("text/event-stream")) return response;
  const reader = response.body.getReader();
  setTimeout(() => reader.cancel(), 3000);
  const parts = [];
  for (let part; !(part = await reader.read()).done; ) parts.push(part.value);
  return new Response(new Blob(parts), response);
}

function ping(url, request) {
  return new Promise((done) => {
    const socket = new WebSocket(url.replace(/^http/, "ws"));
    socket.onopen = () => socket.send('{"op":"ping","request_id":"docs"}');
    socket.onmessage = (message) => {
      done(new Response(message.data, { headers: { "content-type": "application/json" } }));
      socket.close();
    };
    socket.onerror = () => done(fetch(url, request));
  });
}

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  validatorUrl: null,
  requestInterceptor: (request) => {
    request.url = request.url.replace(example, session);
    request.userFetch = send;
    return request;
  },
  responseInterceptor: (response) => {
    session = response.obj?.wid ?? session;
    return response;
  },
});
"""


def page(_state: ServerState, _request: Request) -> Response:
    """`GET /v0/docs`."""
    return Response(200, _PAGE, _HEADERS, _HTML)


async def file(_state: ServerState, request: Request) -> Response:
    """`GET /v0/docs/{file}`: a file that the page loads."""
    name = request.name
    if name == _START:
        script = await asyncio.to_thread(_script)
        return Response(200, script, _HEADERS, _FILES["swagger-ui-bundle.js"])
    kind = _FILES.get(name)
    if kind is None:
        raise TopicsError(Code.NOT_FOUND, "the reference page has no such file")
    return Response(200, await asyncio.to_thread(_content, name), _HEADERS, kind)


async def document(_state: ServerState, request: Request) -> Response:
    """`GET /v0/openapi.json`."""
    return Response(200, await asyncio.to_thread(_document, request.prefix))


# Only the reference needs the modules of the document. A thread imports them here at the first
# request, so the server starts without them (docs/decisions/0260).


def _document(prefix: bytes) -> bytes:
    """*Blocking.*"""
    from topics_server.api.openapi.document import document_bytes

    return document_bytes(prefix)


@cache
def _script() -> bytes:
    """*Blocking.*"""
    from topics_server.api.openapi.examples import WID

    return _SCRIPT % WID.encode()


@cache
def _content(name: str) -> bytes:
    """*Blocking.* A file of the package, read once."""
    found = importlib.util.find_spec("swagger_ui")
    assert found is not None, "it is among the server's dependencies"
    assert found.submodule_search_locations is not None
    return (Path(found.submodule_search_locations[0]) / "static" / name).read_bytes()
