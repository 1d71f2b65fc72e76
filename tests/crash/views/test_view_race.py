"""Read-your-writes in numbers: 32 clients append and query with `after`; no answer is stale."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.contract.driver import Server, good
from tests.contract.views.following import ROWS, Viewing

_CLIENTS = 32


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_after_is_never_stale(tmp_path: Path, view_queries: int) -> None:
    """`--view-queries` sets the number of queries; each answer must have its client's own record
    and the 100 before it.
    """
    server = Server(tmp_path, {"TOPICS_VIEW_AFTER_MS": "60000"})
    api = server.start()
    good(api.put("t"))
    view = Viewing(api, "t").made("rows", ROWS)
    sql = (
        "SELECT (SELECT data FROM rows WHERE seq = :seq), "
        "(SELECT count(*) FROM rows WHERE seq BETWEEN :seq - 100 AND :seq) - min(100, :seq - 1)"
    )
    stale: list[str] = []
    left = iter(range(view_queries))
    taking = threading.Lock()

    def client(number: int) -> int:
        done = 0
        with httpx.Client(base_url=api.url, timeout=120, trust_env=False) as http:
            while True:
                with taking:
                    turn = next(left, None)
                if turn is None:
                    return done
                data = f"{number}-{turn}"
                sent = http.post("/v0/topics/t", json={"records": [{"data": data}]})
                seq = good(sent)["last_seq"]
                url = f"/v0/topics/t/views/{view}/query?after={seq}"
                answer = good(http.post(url, json={"sql": sql, "params": {"seq": seq}}))
                is_right = answer["rows"] == [[json.dumps(data), 1]]
                if not is_right or answer["processed_sequence"] < seq:
                    stale.append(f"{data}, seq {seq}: {answer}")
                done += 1

    try:
        with ThreadPoolExecutor(_CLIENTS) as pool:
            done = sum(pool.map(client, range(_CLIENTS)))
    finally:
        server.signal(signal.SIGTERM)
    assert stale == []
    assert done == view_queries
