"""`topics health`: checks whether a server answers, for health checks.

Exit code 0: the server is healthy. 1: it answered that it is not healthy, or (with --ready) not
ready. 2: no server answers. Without a URL the verb calls the server that runs with the settings of
this environment. A server with `TOPICS_PROBE_AUTH` needs a key: `TOPICS_TOKEN`, or the first key in
`TOPICS_TOKEN_FILE`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from topics_server.cli.connection import CallRefused, Failure, ServerConnection
from topics_server.cli.output import format_options, show_object
from topics_server.values.texts.key_list import KeysError

if TYPE_CHECKING:
    from topics_server.settings import Settings

TIMEOUT_S = 4.0
# A server that listens on all addresses is reached through loopback.
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@click.command("health")
@click.option("--ready", is_flag=True, help="Also check that the server takes requests: /v0/ready.")
@click.option(
    "--url",
    envvar="TOPICS_URL",
    metavar="URL",
    help="Server to ask; default: where TOPICS_HOST and TOPICS_PORT say.  [env: TOPICS_URL]",
)
@click.option("--token", envvar="TOPICS_TOKEN", metavar="KEY", help="[env: TOPICS_TOKEN]")
@click.option(
    "--token-file",
    envvar="TOPICS_TOKEN_FILE",
    type=click.Path(path_type=Path),
    help="File whose first line is the key; may be TOPICS_API_KEYS_FILE.  [env: TOPICS_TOKEN_FILE]",
)
@format_options
def command(
    ready: bool, url: str | None, token: str | None, token_file: Path | None, as_json: bool
) -> None:
    """Check whether a server is alive; the exit code is the result."""
    if not token and token_file is not None:
        token = key_of(token_file)
    client = ServerConnection(url or url_of_environment(), token)
    path = "/v0/ready" if ready else "/v0/health"
    try:
        answer = client.call("GET", path, timeout_s=TIMEOUT_S)
    except CallRefused as refused:
        if refused.status == 401 and not token:
            raise Failure(
                "health checks need a key, too (TOPICS_PROBE_AUTH): set "
                "TOPICS_TOKEN to one, or TOPICS_TOKEN_FILE to a file with one"
            ) from None
        raise
    show_object(answer, as_json=as_json)


def key_of(path: Path) -> str:
    """The first key of a file that holds one key or the server's keys."""
    from topics_server.settings.key_file import first_key

    try:
        return first_key(path)
    except KeysError as error:
        raise Failure(f"TOPICS_TOKEN_FILE={path}: {error}") from None


def url_of_environment() -> str:
    """The URL of the server that runs with the settings of this environment."""
    # Only a check without a URL needs the settings. To import and read them takes longer than the
    # rest of the verb.
    from topics_server.cli.server.flags import loaded

    return url_of(loaded({}).settings)


def url_of(settings: Settings) -> str:
    """The URL at which this machine reaches a server with these settings."""
    host = _EVERYWHERE.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
