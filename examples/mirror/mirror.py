"""Mirror a topic between two servers, both ways: `python mirror.py TOPIC FOLDER A=URL B=URL`.

A and B are names of sites. A record that is written at a site has the site's name as its `node`, or
no node. Each direction reads its source without the records of the other site (the `node` filter),
and appends the records with their node, so that no record returns to its origin. FOLDER stores the
position of each direction.

If the mirror is killed, no record is lost or doubled: before it sends a batch, it stores the
batch's seqs in FOLDER, and after a restart it sends the batch again with the same idempotency key.
The destination remembers keys for two minutes, unless its topic is configured otherwise.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import click
import httpx
import msgspec

LOT = 256
WAIT_MS = 2_000
AGAIN_S = 0.2


class Record(msgspec.Struct, rename={"seq": "$seq", "node": "$node", "tag": "$tag"}):
    """A record of a page; `data` and `meta` keep their bytes."""

    seq: int
    data: msgspec.Raw
    node: str | None = None
    tag: str | None = None
    meta: msgspec.Raw = msgspec.Raw(b"")


class Page(msgspec.Struct):
    """The answer to a diff."""

    records: list[Record]
    next_from_seq: int
    tombstone: dict[str, Any] | None = None


_PAGE: Final = msgspec.json.Decoder(Page)


class Place(msgspec.Struct):
    """The position of one direction: `done`, and the end of the batch in flight."""

    run: str
    done: int = 0
    upto: int = 0


_PLACE: Final = msgspec.json.Decoder(Place)


class Way:
    """One direction."""

    def __init__(self, topic: str, folder: Path, here: tuple[str, str], there: tuple[str, str]):
        self.here, self.there = here[0], there[0]
        self.path = f"/v0/topics/{topic}"
        # The topic's path, used to read on one side and to append on the other.
        self.source = httpx.Client(base_url=here[1], timeout=30, trust_env=False)
        self.dest = httpx.Client(base_url=there[1], timeout=30, trust_env=False)
        self.file = folder / f"{self.here}-{self.there}.json"
        self.place = Place(uuid4().hex)
        if self.file.exists():
            self.place = _PLACE.decode(self.file.read_bytes())

    def run(self) -> None:
        """Mirror until the process ends."""
        while True:
            try:
                self.step()
            except httpx.TransportError:
                time.sleep(AGAIN_S)  # the server does not answer: try again later
            except httpx.HTTPStatusError as error:
                # 404: the topic does not exist yet; 429 and 503 mean: retry.
                if error.response.status_code not in (404, 429, 503):
                    raise
                time.sleep(AGAIN_S)

    def step(self) -> None:
        """Move one batch: read it, store its seqs, send it, store that it is done."""
        place = self.place
        page = self.read()
        if page.tombstone is not None:
            click.echo(f"{self.here}: gap {page.tombstone}", err=True)
            if page.tombstone["reason"] == "recreated":
                # There is a new topic of the same name, whose seqs have another meaning.
                place = self.place = Place(uuid4().hex)
        upto = place.upto if place.upto > place.done else page.next_from_seq
        if upto <= place.done:
            return
        place.upto = upto
        self.note()
        own = [r for r in page.records if r.seq <= upto and r.node in (None, self.here)]
        if own:
            self.send(own, f"mirror {place.run} {place.done}-{upto}")
        place.done = upto
        self.note()

    def read(self) -> Page:
        """The records after the last batch, without the records of the other site."""
        body = {"from_seq": self.place.done, "limit": LOT, "include_tags": True}
        answer = self.source.post(
            f"{self.path}/diff", json={**body, "node": self.there, "wait_ms": WAIT_MS}
        )
        answer.raise_for_status()
        return _PAGE.decode(answer.content)

    def send(self, records: list[Record], key: str) -> None:
        """Append the records on the other side, unchanged except that a record without a node gets
        one.
        """
        told: list[dict[str, Any]] = []
        for record in records:
            fields: dict[str, Any] = {"data": record.data, "node": record.node or self.here}
            if record.tag is not None:
                fields["tag"] = record.tag
            if bytes(record.meta):
                fields["meta"] = record.meta
            told.append(fields)
        body = msgspec.json.encode({"records": told, "idempotency_key": key})
        headers = {"content-type": "application/json"}
        self.dest.post(self.path, content=body, headers=headers).raise_for_status()

    def note(self) -> None:
        """Write the position atomically."""
        whole = self.file.with_suffix(".new")
        whole.write_bytes(msgspec.json.encode(self.place))
        whole.replace(self.file)


def main(topic: str, folder: str, one: str, other: str) -> None:
    """Mirror until stopped."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    name, _, url = one.partition("=")
    other_name, _, other_url = other.partition("=")
    a, b = (name, url), (other_name, other_url)
    ways = [Way(topic, Path(folder), *pair) for pair in ((a, b), (b, a))]
    threads = [threading.Thread(target=way.run, daemon=True) for way in ways]
    for thread in threads:
        thread.start()
    while all(thread.is_alive() for thread in threads):
        time.sleep(AGAIN_S)
    sys.exit("one way ended, see above")


if __name__ == "__main__":
    main(*sys.argv[1:])
