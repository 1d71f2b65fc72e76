"""Enqueue the 329 webhook events of `examples/webhooks`, one job for each event.

The payload is the data, the event's name is the tag. Each batch of lines has an idempotency key. So
a second run, or a lost answer, enqueues nothing twice while the queue remembers the keys: two
minutes by default.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import click

from topics_server.client import NewJob, Queue

EVENTS = Path(__file__).resolve().parents[1] / "webhooks" / "github-webhooks.jsonl.gz"
LOT = 50


def main(url: str, queue: str) -> None:
    """Enqueue every line."""
    lines = gzip.decompress(EVENTS.read_bytes()).splitlines()
    config = {"max_deliveries": 20, "dead_letter": f"{queue}.dead"}
    with Queue(queue, url=url, create=True, config=config) as jobs:
        for first in range(0, len(lines), LOT):
            events = [json.loads(line) for line in lines[first : first + LOT]]
            lot = [NewJob(data=event["payload"], tag=event["event"]) for event in events]
            stored = jobs.enqueue_many(lot, key=f"webhooks-{first}")
            again = ", stored before" if stored.deduped else ""
            click.echo(f"jobs {stored.first_seq} to {stored.last_seq}{again}")


if __name__ == "__main__":
    main(*sys.argv[1:])
