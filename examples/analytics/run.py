"""Load the webhook events spread over time, seal them, and run three jobs on them.

    python examples/analytics/run.py OUT

Starts a server on a free port with a new directory, and stops it at the end. Events arrive in
waves, so that the charts over time have a shape.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve()
EVENTS = HERE.parents[1] / "webhooks" / "github-webhooks.jsonl.gz"
ROUNDS, PAUSE_S = 3, 0.03


def call(url: str, body: object) -> None:
    """POST a JSON body; raise for an error."""
    content = json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


def load(url: str) -> int:
    """Append all events three times, in waves. Pull requests are appended to a separate topic."""
    events = [json.loads(line) for line in gzip.decompress(EVENTS.read_bytes()).splitlines()]
    sent = 0
    for turn in range(ROUNDS):
        at = 0
        while at < len(events):
            wave = 1 + round(14 * (1 + math.sin((sent + turn) / 60)))
            for topic in ("pull-requests", "everything-else"):
                records = [
                    {"data": e, "tag": e["event"], "node": owner_of(e)}
                    for e in events[at : at + wave]
                    if e["event"].startswith("pull_request") == (topic == "pull-requests")
                ]
                if records:
                    call(f"{url}/v0/topics/{topic}", {"records": records})
            at += wave
            sent += wave
            time.sleep(PAUSE_S)
    call(f"{url}/v0/admin/seal", {})
    return sent


def owner_of(event: dict[str, object]) -> str:
    """The user or repository of an event, used as the record's node."""
    payload = event["payload"]
    assert isinstance(payload, dict)
    sender = payload.get("sender") or {}
    return str(sender.get("login") or "nobody")


def serve(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Run a server on a free port and return its URL."""
    port_file = folder / "port"
    env = {
        **os.environ,
        "TOPICS_PORT": "0",
        "TOPICS_PORT_FILE": str(port_file),
        "TOPICS_DATA_DIR": str(folder / "data"),
    }
    command = [sys.executable, "-m", "topics_server", "serve"]
    server = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    for _ in range(600):
        if port_file.exists() and port_file.read_text().strip().isdigit():
            return server, f"http://127.0.0.1:{port_file.read_text().strip()}"
        if server.poll() is not None:
            break
        time.sleep(0.05)
    raise SystemExit("the server did not start")


def analyse(data_dir: Path, out: Path) -> int:
    """Run three jobs in one Spark session; each writes a picture and a table."""
    from spark_jobs import sessions, tag_activity, topic_volume
    from spark_jobs.session import spark_session

    spark = spark_session("topics example", config={"spark.sql.shuffle.partitions": "2"})

    def words(name: str, *more: str) -> list[str]:
        picture = str(out / f"{name}.svg")
        return [str(data_dir), "--out", str(out / name), "--picture", picture, *more]

    done = (
        topic_volume.main(words("topic_volume", "--bucket", "200 milliseconds", "--rows", "5")),
        tag_activity.main(words("tag_activity", "--bucket-s", "1", "--rows", "5")),
        sessions.main(words("sessions", "--by", "node", "--gap", "1 second", "--rows", "5")),
    )
    spark.stop()
    return max(done)


def main() -> int:
    """Load and analyse (see the module)."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "analytics-out").resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        server, url = serve(Path(folder))
        try:
            sys.stderr.write(f"{load(url)} events are in two topics, and sealed\n")
            failed = analyse(Path(folder) / "data", out)
        finally:
            server.terminate()
            server.wait(30)
    sys.stderr.write(f"pictures and Parquet are in {out}\n")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
