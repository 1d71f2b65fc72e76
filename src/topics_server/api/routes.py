"""The route table: which handler answers which method and path (§9)."""

from __future__ import annotations

from topics_server.api.consumers import handlers as consumers
from topics_server.api.live import handlers as live
from topics_server.api.operate import admin, backup, console, front_page, probes, reference
from topics_server.api.queues import handlers as queues
from topics_server.api.records import find
from topics_server.api.records import handlers as records
from topics_server.api.request import Handler
from topics_server.api.routers import handlers as routers
from topics_server.api.routing import Route, Routes
from topics_server.api.streams import handlers as streams
from topics_server.api.topics import handlers as topics
from topics_server.api.views import handlers as views
from topics_server.api.watch import handlers as watch
from topics_server.api.websocket import handlers as ws
from topics_server.auth.api_keys import ANY_KEY, PROBE
from topics_server.values.limits import STREAMS_PATH
from topics_server.values.texts.key_list import ADMIN, DELETE, READ, WRITE


def build_routes(mount: str = STREAMS_PATH) -> Routes:
    """The routes of every path of the server; any other path is 404. Streams are below `mount`."""
    return Routes(
        (
            *_streams(mount),
            Route("/v0/topics", {"GET": topics.list_topics}, needs={"GET": READ}),
            Route(
                "/v0/topics/{topic}",
                {
                    "PUT": topics.put_topic,
                    "PATCH": topics.patch_topic,
                    "GET": topics.get_topic,
                    "DELETE": topics.drop_topic,
                    "POST": records.append,
                },
                needs={
                    "PUT": ADMIN,
                    "PATCH": ADMIN,
                    "GET": READ,
                    "DELETE": DELETE,
                    "POST": WRITE,
                },
                appends=("POST",),
                hot=("GET", "POST"),
            ),
            Route(
                "/v0/topics/{topic}/diff",
                {"POST": records.diff},
                needs={"POST": READ},
                hot=("POST",),
            ),
            Route("/v0/topics/{topic}/records", {"GET": find.list_records}, needs={"GET": READ}),
            Route(
                "/v0/topics/{topic}/records/{seq}",
                {"GET": find.get_record},
                needs={"GET": READ},
            ),
            _post("delete", records.delete, DELETE),
            _post("claim", queues.claim, READ | WRITE, hot=("POST",)),
            _post("ack", queues.ack, WRITE, hot=("POST",)),
            _post("nack", queues.nack, WRITE),
            _post("extend", queues.extend, WRITE),
            _post("redrive", queues.redrive, WRITE),
            Route(
                "/v0/topics/{topic}/work",
                {"GET": queues.work},
                needs={"GET": READ | WRITE},
                is_stream=True,
            ),
            Route("/v0/topics/{topic}/leases", {"GET": queues.leases}, needs={"GET": READ}),
            Route(
                "/v0/topics/{topic}/consumers",
                {"GET": consumers.list_consumers},
                needs={"GET": READ},
            ),
            Route(
                "/v0/topics/{topic}/consumers/{consumer}",
                {"PUT": consumers.put, "GET": consumers.get, "DELETE": consumers.delete},
                needs={"PUT": READ | WRITE, "GET": READ, "DELETE": READ | WRITE},
            ),
            Route(
                "/v0/topics/{topic}/consumers/{consumer}/commit",
                {"POST": consumers.commit},
                needs={"POST": READ | WRITE},
            ),
            Route("/v0/topics/{topic}/views", {"GET": views.list_views}, needs={"GET": READ}),
            Route(
                "/v0/topics/{topic}/views/{view}",
                {"PUT": views.put_view, "GET": views.get_view, "DELETE": views.drop_view},
                needs={"PUT": ADMIN, "GET": READ, "DELETE": ADMIN},
            ),
            _view("stats", "GET", views.view_stats, READ),
            _view("rebuild", "POST", views.rebuild_view, ADMIN),
            _view("query", "POST", views.query_view, READ),
            _view("query/{query}", "GET", views.named_query, READ),
            Route(
                "/v0/topics/{topic}/views/{view}/live",
                {"GET": views.live},
                needs={"GET": READ},
                is_stream=True,
            ),
            Route(
                "/v0/topics/{topic}/live",
                {"GET": live.stream, "POST": live.issue_ticket},
                needs={"GET": READ, "POST": READ},
                is_stream=True,
            ),
            Route(
                "/v0/live",
                {"GET": live.stream, "POST": live.issue_ticket},
                needs={"GET": READ, "POST": READ},
                is_stream=True,
            ),
            Route("/v0/routers", {"GET": routers.list_routers}, needs={"GET": READ}),
            Route(
                "/v0/routers/{router}",
                {
                    "PUT": routers.put_router,
                    "GET": routers.get_router,
                    "DELETE": routers.drop_router,
                },
                needs={"PUT": ADMIN, "GET": READ, "DELETE": DELETE},
            ),
            Route("/v0/watch", {"POST": watch.open_session}, needs={"POST": READ}),
            Route("/v0/watch/{wid}", {"GET": watch.stream}, needs={"GET": READ}, is_stream=True),
            Route("/v0/ws", {"GET": ws.no_upgrade}, needs={"GET": ANY_KEY}),
            Route("/v0/health", {"GET": probes.health}, needs={"GET": PROBE}),
            Route("/healthz", {"GET": probes.health}, needs={"GET": PROBE}),
            Route("/v0/ready", {"GET": probes.ready}, needs={"GET": PROBE}),
            Route("/readyz", {"GET": probes.ready}, needs={"GET": PROBE}),
            Route("/v0/metrics", {"GET": probes.metrics}, needs={"GET": READ}),
            Route("/v0/admin/seal", {"POST": admin.seal}, needs={"POST": ADMIN}),
            Route(
                "/v0/admin/backup",
                {"POST": backup.start_backup, "GET": backup.show_backup},
                needs={"POST": ADMIN, "GET": ADMIN},
            ),
            Route("/", {"GET": front_page.page}, needs={"GET": PROBE}),
            Route("/console", {"GET": console.page}, needs={"GET": PROBE}),
            Route("/console/static/{file}", {"GET": console.file}, needs={"GET": PROBE}),
            Route("/v0/openapi.json", {"GET": reference.document}, needs={"GET": PROBE}),
            Route("/v0/docs", {"GET": reference.page}, needs={"GET": PROBE}),
            Route("/v0/docs/{file}", {"GET": reference.file}, needs={"GET": PROBE}),
        )
    )


def _streams(mount: str) -> tuple[Route, ...]:
    if not mount:
        return ()
    return (
        Route(
            f"{mount}/{{path}}",
            {
                "PUT": streams.create,
                "POST": streams.append,
                "GET": streams.read,
                "DELETE": streams.delete,
            },
            # In this protocol a writer may create streams, as an append may create a topic.
            needs={"PUT": WRITE, "POST": WRITE, "GET": READ, "DELETE": DELETE},
            appends=("PUT", "POST"),
            hot=("GET", "POST"),
        ),
    )


def _post(verb: str, handler: Handler, need: int, hot: tuple[str, ...] = ()) -> Route:
    template = f"/v0/topics/{{topic}}/{verb}"
    return Route(template, {"POST": handler}, needs={"POST": need}, hot=hot)


def _view(verb: str, method: str, handler: Handler, need: int) -> Route:
    template = f"/v0/topics/{{topic}}/views/{{view}}/{verb}"
    return Route(template, {method: handler}, needs={method: need})
