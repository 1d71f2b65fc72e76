"""A small S3 in this process: buckets in memory, conditional puts, ranges, lists with a delimiter.

It does not check signatures. If `failing` is N, one request in N gets 503; half of these requests
are carried out first.
"""

from __future__ import annotations

import hashlib
import random
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

_RANGE: Final = re.compile(r"bytes=(\d+)-(\d+)", re.ASCII)
_TIME: Final = "2026-01-01T00:00:00.000Z"
_HTTP_TIME: Final = "Thu, 01 Jan 2026 00:00:00 GMT"


class Buckets:
    """One server; every bucket exists."""

    def __init__(self, failing: int = 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.failing = failing
        self.failed = 0
        # Method, path, and the prefix of a list, of each request that was carried out.
        self.asked: list[str] = []
        self.rng = random.Random(1)
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Serve; the address."""
        buckets = self

        class Handler(_Handler):
            store = buckets

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        """Close the socket and end the threads."""
        assert self._server is not None
        assert self._thread is not None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    store: Buckets
    protocol_version = "HTTP/1.1"
    timeout = 1.0

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        store = self.store
        with store.lock:
            fails = store.failing > 0 and store.rng.randrange(store.failing) == 0
            if fails:
                store.failed += 1
            if fails and store.rng.random() < 0.5:
                self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
                return
            found = self._found(body)
        if fails:
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
            return
        status, content, headers = found
        self._answer(status, content, **headers)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _serve

    def _found(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        path = unquote(url.path).lstrip("/")
        objects = self.store.objects
        self.store.asked.append(f"{self.command} {path}{''.join(query.get('prefix', []))}")
        if self.command == "POST" and "delete" in query:
            bucket = path.split("/")[0]
            keys = [
                each.text or ""
                for each in ElementTree.fromstring(body).iter()
                if each.tag.endswith("Key")
            ]
            for key in keys:
                objects.pop(f"{bucket}/{key}", None)
            gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return 200, f"<DeleteResult>{gone}</DeleteResult>".encode(), {}
        if "list-type" in query:
            return 200, self._listed(path.rstrip("/"), query), {"Content_Type": "application/xml"}
        if self.command == "PUT":
            if "/" in path and path in objects and self.headers.get("If-None-Match") == "*":
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
            if "/" in path:
                objects[path] = body
            return 200, b"", {"ETag": _tag(body)}
        if path not in objects:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        if self.command == "DELETE":
            del objects[path]
            return 204, b"", {}
        content = objects[path]
        facts = {"ETag": _tag(content), "Last_Modified": _HTTP_TIME}
        if self.command == "HEAD":
            facts["Content_Length"] = str(len(content))
        asked = _RANGE.fullmatch(self.headers.get("Range") or "")
        if asked is None:
            return 200, content, facts
        start, end = int(asked[1]), min(int(asked[2]) + 1, len(content))
        if start >= end:
            return 416, b"<Error><Code>InvalidRange</Code></Error>", {}
        facts["Content_Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        return 206, content[start:end], facts

    def _listed(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        keys = sorted(
            name[len(bucket) + 1 :]
            for name in self.store.objects
            if name.startswith(f"{bucket}/{prefix}")
        )
        folders = sorted({_folder(key, prefix) for key in keys} - {""})
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_TIME}</LastModified>"
            f"<ETag>{escape(_tag(self.store.objects[f'{bucket}/{key}']))}</ETag>"
            f"<Size>{len(self.store.objects[f'{bucket}/{key}'])}</Size></Contents>"
            for key in keys
            if not _folder(key, prefix)
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders
        )
        text = (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<IsTruncated>false</IsTruncated>{items}{common}</ListBucketResult>"
        )
        return text.encode()


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _folder(key: str, prefix: str) -> str:
    """The common prefix of a key; empty for a key directly below the requested prefix."""
    head, slash, _ = key[len(prefix) :].partition("/")
    return f"{prefix}{head}/" if slash else ""
