"""Counts the costs of reads and the ranges that they left out; each partition stores one JSON line.

A report folder is for tests, benchmarks and tolerant reads: a Python source of Spark cannot report
skipped records in another way. Each process writes its lines to its own file; each line is one
write.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Skipped:
    """A range that a tolerant read left out, and the reason."""

    topic: str
    file: str
    first_seq: int
    last_seq: int
    reason: str


@dataclass(slots=True)
class ReadReport:
    """Counts of one partition. `bytes`: bytes read from files, headers and flags included."""

    segments: int = 0
    files: int = 0
    bytes: int = 0
    rows: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def opened(self, path: str) -> None:
        """Count an opened file."""
        self.files += 1
        self.names.append(path)

    def skip(self, topic: str, file: str, seqs: tuple[int, int], reason: str) -> None:
        """Count a range that is left out, and write it to the task's log, for the operator."""
        self.skipped.append(Skipped(topic, file, *seqs, reason))
        sys.stderr.write(f"topics: left out seqs {seqs[0]}..{seqs[1]} of {topic}: {reason}\n")

    def add(self, other: ReadReport) -> None:
        """Add the counts of another report."""
        self.segments += other.segments
        self.files += other.files
        self.bytes += other.bytes
        self.rows += other.rows
        self.skipped += other.skipped
        self.names += other.names

    def keep(self, folder: str) -> None:
        """Append this report to the folder's file of this process."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        line = json.dumps(asdict(self)) + "\n"
        with (target / f"{os.uname().nodename}-{os.getpid()}.jsonl").open("a") as file:
            file.write(line)


def read_reports(folder: str | Path) -> ReadReport:
    """The sum of all reports of a folder."""
    total = ReadReport()
    for path in sorted(Path(folder).glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            fields = json.loads(line)
            fields["skipped"] = [Skipped(**each) for each in fields["skipped"]]
            total.add(ReadReport(**fields))
    return total
