"""The driver's cost of many segments: planning a read of them, and a stream's trigger.

Run by `python -m benchmarks.analytics plan` and `compare`, in a new process: the memory is the peak
of the process minus the peak after its imports. It uses the `spark_jobs` of its interpreter, so the
same file measures another build: `OTHER/.venv/bin/python benchmarks/planning.py DIR`. DIR is a data
directory of one topic. Prints a line of JSON; times are seconds, sizes MB.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import resource
import statistics
import sys
import time
from typing import Any, Final

_TURNS: Final = 7


def peak_mb() -> float:
    """The peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds(work: Any) -> tuple[float, Any]:
    """The seconds that a call takes, and its result."""
    began = time.perf_counter()
    made = work()
    return time.perf_counter() - began, made


def main(data_dir: str) -> dict[str, Any]:
    """Measure one build."""
    import pyarrow  # noqa: F401

    from spark_jobs.datasource import TopicsReader

    # Older builds, without folders, had both modules next to `datasource`.
    folder = "spark_jobs.reader" if importlib.util.find_spec("spark_jobs.reader") else "spark_jobs"
    parse_options = importlib.import_module(f"{folder}.options").parse_options
    TopicsStreamReader = importlib.import_module(f"{folder}.streaming").TopicsStreamReader

    parsed = parse_options({"path": data_dir, "warn": "false"})
    before = peak_mb()
    first, partitions = seconds(TopicsReader(parsed, parsed.query).partitions)
    sent, pickled = seconds(lambda: [pickle.dumps(each) for each in partitions])
    memory = peak_mb() - before
    again = [seconds(TopicsReader(parsed, parsed.query).partitions)[0] for _ in range(_TURNS)]
    found: dict[str, Any] = {
        "partitions": len(partitions),
        "segments": sum(len(each.segments) for each in partitions),
        "plan_first_s": first,
        "plan_min_s": min(again),
        "plan_median_s": statistics.median(again),
        "pickle_s": sent,
        "pickled_mb": sum(map(len, pickled)) / 2**20,
        "memory_mb": memory,
    }

    stream = TopicsStreamReader(parsed, parsed.query)
    limit = stream.getDefaultReadLimit()
    cold, end = seconds(lambda: stream.latestOffset(stream.initialOffset(), limit))
    # All segments but the last are already consumed.
    start = json.loads(json.dumps(end))
    last = max(partitions[-1].segments, key=lambda each: each.entry.last_seq).entry
    for place in start["topics"].values():
        place[1] = last.first_seq
    nothing = [seconds(lambda: stream.latestOffset(end, limit))[0] for _ in range(_TURNS)]
    batch = [
        seconds(lambda: stream.partitions(start, stream.latestOffset(start, limit)))[0]
        for _ in range(_TURNS)
    ]
    found["trigger_first_s"] = cold
    found["trigger_nothing_new_s"] = statistics.median(nothing)
    found["trigger_one_segment_s"] = statistics.median(batch)
    return {name: round(value, 5) for name, value in found.items()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
