"""Signs a request to an S3 server that checks signatures (version 4), with the standard library."""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlsplit

KEY: Final = "an-access-key"
SECRET: Final = "a-secret-of-the-store"
REGION: Final = "us-east-1"


def signed(method: str, url: str) -> dict[str, str]:
    """The headers of a request without a body and without a query."""
    parts = urlsplit(url)
    time = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    day, empty = time[:8], hashlib.sha256(b"").hexdigest()
    headers = {"host": parts.netloc, "x-amz-content-sha256": empty, "x-amz-date": time}
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = "\n".join((method, parts.path, "", lines, names, empty))
    scope = f"{day}/{REGION}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join(("AWS4-HMAC-SHA256", time, scope, digest))
    signer = f"AWS4{SECRET}".encode()
    for word in (day, REGION, "s3", "aws4_request"):
        signer = hmac.digest(signer, word.encode(), "sha256")
    signature = hmac.digest(signer, text.encode(), "sha256").hex()
    scoped = f"Credential={KEY}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "authorization": f"AWS4-HMAC-SHA256 {scoped}"}
