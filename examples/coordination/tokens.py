"""Write a text to a stream word by word, like a language model. `tokens.html` reads it live.

    python tokens.py http://127.0.0.1:4000/v1/stream/answers/1 [--pause 0.1] < text

If the program is killed and started again with the same input, it continues after the last stored
word. No word is lost or doubled: word N is always seq N of epoch 0, so an append of a stored word
is a repeat.
"""

from __future__ import annotations

import argparse
import re
import sys
import time

import httpx
from streams import ask

from topics_server.client import IdempotentProducer, Undelivered

TEXT = "text/plain; charset=utf-8"


def main() -> None:
    """Write standard input, then close the stream."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between words")
    options = parser.parse_args()
    words = re.findall(r"\s*\S+|\s+$", sys.stdin.read())
    with httpx.Client(trust_env=False, timeout=60) as http:
        there = ask(http, "HEAD", options.url)
        if there.headers.get("Stream-Closed") == "true":
            sys.exit("the answer is complete")
        if there.status_code == 404:
            ask(http, "PUT", options.url, headers={"Content-Type": TEXT})
        try:
            write(options.url, words, options.pause)
        except Undelivered as error:
            sys.exit(f"stopped: {error}")
        ask(http, "POST", options.url, headers={"Stream-Closed": "true"})


def write(url: str, words: list[str], pause_s: float) -> None:
    """Write every word. A word that an earlier run stored is a repeat, and needs no pause."""
    with IdempotentProducer(
        url,
        "model",
        content_type=TEXT,
        epoch=0,
        seq=0,
        linger_ms=0,
        batch_records=1,
        patience_ms=None,
    ) as model:
        for word in words:
            if not model.send(word.encode()).result().repeated:
                time.sleep(pause_s)


if __name__ == "__main__":
    main()
