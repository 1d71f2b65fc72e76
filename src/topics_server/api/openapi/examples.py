"""The example requests and answers of the OpenAPI document. Pure.

Sent to an empty server in the order of the page, each example succeeds: one topic of type `queue`
serves every operation of topics, records and queues, and the append creates it again after the
drop. The released job exceeds `max_deliveries` and becomes a dead letter; the redrive undoes that.
A test sends all examples. Used by `api/openapi/operations`.
"""

from __future__ import annotations

from typing import Any, Final

_NODE: Final = "worker-1"
_QUEUE: Final = {"type": "queue", "max_deliveries": 1, "dead_letter": "jobs.dead"}
# The reference page replaces this text with the id of the last session; see
# `api/operate/reference`.
WID: Final = "wid_of-the-last-session"

# Example values of path parameters, by name.
IN_PATH: Final = {
    "topic": "jobs",
    "router": "events->audit",
    "wid": WID,
    "file": "start.js",
    "path": "notes",
    "view": "by-tag",
    "query": "all",
    "seq": "1",
    "consumer": "billing",
}

# Example bodies, by operation id.
BODIES: Final[dict[str, Any]] = {
    "putTopic": _QUEUE | {"lease_ms": 30_000},
    "patchTopic": {"lease_ms": 60_000},
    "appendRecords": {
        "records": [
            {"data": {"resize": f"{number}.png", "width": 256}, "tag": f"tenant42:job-{number}"}
            for number in range(1, 5)
        ],
        "node": "web-1",
        "config": _QUEUE,
    },
    "readRecords": {"from_seq": 0, "limit": 100, "include_tags": True},
    "putConsumer": {"from": "earliest"},
    "commitConsumer": {"seq": 2, "if_seq": 0},
    "deleteRecords": {"match": "tenant42:job-4"},
    "claimJobs": {"node": _NODE, "max": 3, "lease_ms": 60_000},
    "ackJobs": {"node": _NODE, "seqs": [1]},
    "nackJobs": {"node": _NODE, "seqs": [2], "delay_ms": 0},
    "extendJobs": {"node": _NODE, "seqs": [3], "lease_ms": 60_000},
    "redriveJobs": {"all": True, "max": 10},
    "putRouter": {"source": "events", "dest": "audit", "filter": ["tag", "Glob", "public:*"]},
    "putView": {"shortcut": {"count_by_tag": True}},
    "queryView": {
        "sql": "SELECT tag, count FROM counts WHERE count >= :least",
        "params": {"least": 1},
    },
    "rebuildView": {},
    "openWatch": {"topics": {"jobs": {"from_seq": 0}, "events": {"tail": True}}, "wait": True},
    "seal": {"topics": ["jobs"]},
    "createStream": [{"note": "the first message"}],
    "appendToStream": [{"note": "the second message"}, {"note": "the third"}],
}

# Example values of query parameters, by operation id and name. All other parameters stay empty or
# have a default.
IN_QUERY: Final = {
    "work": {"node": _NODE},
    "liveQuery": {"query": "all"},
    "live": {"topics": "jobs", "prefix": "events"},
    "issueTicket": {"topics": "jobs", "prefix": "events"},
}
