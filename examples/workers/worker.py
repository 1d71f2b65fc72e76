"""A worker of webhook events: `python worker.py URL QUEUE RESULTS NAME`.

The effect of a job is a file in RESULTS, named after the job's seq. At-least-once delivery requires
that a handler may run twice: writing the file again does not change the result. `RESULTS/NAME.log`
gets a line when a job begins and when it ends, which shows later which jobs ran more than once.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from pathlib import Path

from topics_server.client import Backoff, Drop, Job, Worker


def main(url: str, queue: str, results: str, name: str) -> None:
    """Work until SIGTERM."""
    logging.basicConfig(level=logging.ERROR)
    folder = Path(results)
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def handle(job: Job) -> None:
        os.write(log, f"begun {job.seq} {job.deliveries}\n".encode())
        if job.tag == "ping":
            raise Drop("nobody wants these")
        if job.tag == "push" and job.deliveries == 1:
            raise ConnectionError("the first try of a push always fails here")
        time.sleep(random.uniform(0.05, 0.2))
        if job.lost.is_set():
            return  # another worker has the job, and this result would be discarded
        text = f"{job.tag}: {job.data.get('action', '-')}\n"
        whole = folder / f".{job.seq}-{name}"
        whole.write_text(text)
        whole.replace(folder / str(job.seq))  # atomic, and safe to repeat
        os.write(log, f"done {job.seq} {job.deliveries}\n".encode())

    worker = Worker(
        handle,
        queue,
        url=url,
        concurrency=4,
        lease_ms=5000,
        backoff=Backoff(base_ms=100, cap_ms=2000),
    )
    stats = worker.run()
    os.write(log, f"stopped {stats}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
