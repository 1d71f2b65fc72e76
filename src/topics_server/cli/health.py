"""`topics health`: does a server answer? For health checks of containers, which have no curl.

Exit code 0: it does. 1: it answered that it is not well, or (with --ready) not ready. 2: nobody
answers. Without a URL it asks the server that runs with the settings of this environment.
"""

from __future__ import annotations

import click

from topics_server.cli.client import Client
from topics_server.cli.flags import loaded
from topics_server.cli.output import format_options, show_object
from topics_server.settings import Settings

TIMEOUT_S = 4.0
# What a server listens on that listens on all addresses is reached through loopback.
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@click.command("health")
@click.option("--ready", is_flag=True, help="Also whether it takes requests: /v0/ready.")
@click.option(
    "--url",
    envvar="TOPICS_URL",
    metavar="URL",
    help="Server to ask; default: where TOPICS_HOST and TOPICS_PORT say.  [env: TOPICS_URL]",
)
@click.option("--token", envvar="TOPICS_TOKEN", metavar="KEY", help="[env: TOPICS_TOKEN]")
@format_options
def command(ready: bool, url: str | None, token: str | None, as_json: bool) -> None:
    """Ask a server whether it is alive; the exit code is the answer."""
    client = Client(url or url_of(loaded({}).settings), token)
    path = "/v0/ready" if ready else "/v0/health"
    answer = client.call("GET", path, timeout_s=TIMEOUT_S)
    show_object(answer, as_json=as_json)


def url_of(settings: Settings) -> str:
    """Where a server with these settings is reached from this machine."""
    host = _EVERYWHERE.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
