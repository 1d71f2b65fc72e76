"""The route table, and nothing else: which function answers which method of which path (§9)."""

from __future__ import annotations

from topics_server.api import (
    openapi,
    probes,
    queues,
    records,
    reference,
    routers,
    topics,
    watch,
    ws,
)
from topics_server.api.http import Application, Request, Response, Route, Routes
from topics_server.api.state import ServerState


def build_routes() -> Routes:
    """Every path of the server; a template without a row is 404."""
    return Routes(
        (
            Route("/v0/topics", {"GET": topics.list_topics}),
            Route(
                "/v0/topics/{topic}",
                {
                    "PUT": topics.put_topic,
                    "GET": topics.get_topic,
                    "DELETE": topics.drop_topic,
                    "POST": records.append,
                },
                {"GET": topics.get_topic, "POST": records.append_now},
            ),
            Route("/v0/topics/{topic}/diff", {"POST": records.diff}, {"POST": records.diff_now}),
            Route("/v0/topics/{topic}/delete", {"POST": records.delete}),
            Route("/v0/topics/{topic}/claim", {"POST": queues.claim}),
            Route("/v0/topics/{topic}/ack", {"POST": queues.ack}),
            Route("/v0/topics/{topic}/nack", {"POST": queues.nack}),
            Route("/v0/topics/{topic}/extend", {"POST": queues.extend}),
            Route("/v0/topics/{topic}/work", {"GET": queues.work}),
            Route("/v0/topics/{topic}/redrive", {"POST": queues.redrive}),
            Route("/v0/topics/{topic}/leases", {"GET": queues.leases}),
            Route("/v0/routers", {"GET": routers.list_routers}),
            Route(
                "/v0/routers/{router}",
                {
                    "PUT": routers.put_router,
                    "GET": routers.get_router,
                    "DELETE": routers.drop_router,
                },
            ),
            Route("/v0/watch", {"POST": watch.open_session}),
            Route("/v0/watch/{wid}", {"GET": watch.stream}),
            Route("/v0/ws", {"GET": ws.no_upgrade}),
            Route("/v0/health", {"GET": probes.health}),
            Route("/healthz", {"GET": probes.health}),
            Route("/v0/ready", {"GET": probes.ready}),
            Route("/readyz", {"GET": probes.ready}),
            Route("/v0/metrics", {"GET": probes.metrics}),
            Route("/v0/openapi.json", {"GET": _openapi}),
            Route("/v0/docs", {"GET": reference.page}),
            Route("/v0/docs/{file}", {"GET": reference.file}),
        )
    )


def _openapi(_state: ServerState, _request: Request) -> Response:
    return Response(200, openapi.document_bytes())


def build_app(state: ServerState) -> Application:
    """The ASGI application of one server."""
    return Application(state, build_routes(), {b"/v0/ws": ws.serve})
