"""The image: the result of its steps, run as its user, with one writable folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.contract.driver import START_WITHIN_S, Api, eventually
from tests.docker.image import Built, only, settings_of
from topics_server.settings import Settings, variable

STOP_WITHIN_S: Final = 5.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The image's folders."""
    made = Built(tmp_path_factory.mktemp("image") / "root")
    made.build()
    return made


class Container:
    """The image's command in a process: its environment, its user, its one writable folder."""

    def __init__(self, built: Built, directory: Path, **env: str) -> None:
        self.built = built
        self.directory = directory
        stage = built.final_stage
        fixed = {key: built.rewritten(value) for key, value in settings_of(stage).items()}
        path = [built.rewritten(part) for part in settings_of(stage)["PATH"].split(":")]
        self.data = built.place("/data")
        self.env = built.environment({**fixed, "PATH": ":".join(path), **env})
        self.user, self.group = map(int, only(stage, "USER").split(":"))
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory / "log"

    def command(self, *words: str) -> list[str]:
        """The command as an engine would start it."""
        entry = json.loads(only(self.built.final_stage, "ENTRYPOINT"))
        program = shutil.which(entry[0], path=self.env["PATH"])
        assert program is not None
        return [program, *entry[1:], *words]

    def _who(self) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        return {"user": self.user, "group": self.group, "extra_groups": []}

    def run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command beside the server, like a health check."""
        return subprocess.run(
            words,
            env=self.env,
            cwd="/",
            capture_output=True,
            timeout=60,
            check=False,
            **self._who(),
        )

    def start(self) -> Api:
        """Start it and wait until it is ready."""
        words = json.loads(only(self.built.final_stage, "CMD"))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(*words),
                env=self.env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **self._who(),
            )
        deadline = time.monotonic() + START_WITHIN_S
        while (found := re.search(r"ready on http://\S+:(\d+) ", self.log.read_text())) is None:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return Api(f"http://127.0.0.1:{found[1]}")

    def stop(self) -> tuple[int, float]:
        """(exit code, seconds) of a SIGTERM."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(getattr(signal, only(self.built.final_stage, "STOPSIGNAL")))
        code = self.process.wait(START_WITHIN_S)
        self.process = None
        return code, time.monotonic() - began


@pytest.fixture
def container(built: Built, tmp_path: Path) -> Iterator[Container]:
    """One container that is not started."""
    made = Container(built, tmp_path, TOPICS_PORT="0", TOPICS_ALLOW_INSECURE_NO_AUTH="1")
    # Without this only root could enter our folders, but the image's user has to pass through them.
    for folder in (*built.root.parents, built.root):
        if os.geteuid() == 0 and folder.is_relative_to(Path(os.environ.get("TMPDIR", "/tmp"))):
            folder.chmod(folder.stat().st_mode | 0o011)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait()


def test_every_setting_of_the_image_is_one(built: Built) -> None:
    names = {variable(field) for field in Settings.model_fields}
    given = {name for name in settings_of(built.final_stage) if name.startswith("TOPICS_")}
    assert given <= names
    assert (built.place("/data").stat().st_mode & 0o777) == 0o700


def test_the_image_has_only_the_files_that_the_server_needs(built: Built) -> None:
    folder = built.place("/opt/topics")
    (packages,) = folder.glob("lib/python3*/site-packages")
    names = {path.name.partition("-")[0].lower() for path in packages.glob("*.dist-info")}
    assert {"topics_server", "uvicorn", "msgspec", "numpy"} <= names
    assert not names & {"pip", "pytest", "mypy", "ruff", "hypothesis", "hatchling", "build"}
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"/opt/topics: {size / 2**20:.0f} MiB")
    assert size < 200 * 2**20
    # The modules are compiled at installation, because a read-only root cannot store compiled files
    # of a first run.
    assert list((packages / "topics_server").glob("__pycache__/server.*.pyc"))


def test_without_keys_it_refuses_to_listen_on_all_addresses(container: Container) -> None:
    del container.env["TOPICS_ALLOW_INSECURE_NO_AUTH"]
    done = container.run(*container.command("serve"))
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert "TOPICS_API_KEYS" in line


@pytest.mark.parametrize("way", ["TOPICS_TOKEN", "TOPICS_TOKEN_FILE"])
def test_the_health_check_works_where_probes_ask_for_a_key(
    container: Container, tmp_path: Path, way: str
) -> None:
    """As in compose.yaml: one secret is the key file of both the server and the check."""
    secret = container.built.root / "api-keys"
    secret.write_text("probe-key:read\n")
    secret.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(secret, container.user, container.group)
    given = {"TOPICS_TOKEN": "probe-key", "TOPICS_TOKEN_FILE": str(secret)}
    container.env |= {"TOPICS_API_KEYS_FILE": str(secret), "TOPICS_PROBE_AUTH": "1"}
    check = json.loads(only(container.built.final_stage, "HEALTHCHECK").partition(" CMD ")[2])
    api = container.start()
    container.env["TOPICS_URL"] = api.url
    unhealthy = container.run(*container.command(*check[1:]))
    assert unhealthy.returncode == 1
    assert b"TOPICS_TOKEN_FILE" in unhealthy.stderr
    container.env[way] = given[way]
    healthy = container.run(*container.command(*check[1:]))
    assert healthy.returncode == 0, healthy.stderr
    assert container.stop()[0] == 0
    api.close()


def test_it_runs_as_its_user_is_healthy_and_ends_in_time_with_everything_synced(
    container: Container,
) -> None:
    api = container.start()
    assert container.process is not None
    status = Path(f"/proc/{container.process.pid}/status").read_text()
    uids = re.search(r"^Uid:\s+(\d+)\s+(\d+)", status, re.MULTILINE)
    assert uids is not None
    expected = str(container.user) if os.geteuid() == 0 else str(os.geteuid())
    assert set(uids.groups()) == {expected}

    check = json.loads(only(container.built.final_stage, "HEALTHCHECK").partition(" CMD ")[2])
    url = {"TOPICS_URL": api.url}
    container.env |= url
    healthy = container.run(*container.command(*check[1:]))
    assert check[0] == "topics"
    assert healthy.returncode == 0, healthy.stderr
    assert json.loads(healthy.stdout)["status"] == "ok"
    assert container.run(*container.command("health", "--ready")).returncode == 0

    # The test keeps an endless stream open and appends until the last moment.
    api.add("kept", *range(100))
    acknowledged = Writer(api, container)
    code, seconds = acknowledged.stop()
    print(f"SIGTERM to the end: {seconds:.2f} s")
    assert code == 0, container.log.read_text()
    assert seconds <= STOP_WITHIN_S
    assert json.loads((container.data / "FORMAT").read_text())["clean_stop"] is True
    assert container.run(*container.command(*check[1:])).returncode == 2

    verified = container.run(*container.command("verify", str(container.data)))
    assert verified.returncode == 0, verified.stdout
    again = container.start()
    stored = {record["data"] for record in again.read_all("kept", limit=1000)}
    assert stored >= set(range(acknowledged.last + 1))
    again.close()
    assert container.stop()[0] == 0


class Writer:
    """Appends in a thread until it is refused; `last` is the last acknowledged seq."""

    def __init__(self, api: Api, container: Container) -> None:
        self.last = 99
        self._api = api
        self._container = container
        wid = api.http.post("/v0/watch", json={"topics": {"kept": {}}}).json()["stream_url"]
        self._threads = [
            threading.Thread(target=self._append),
            threading.Thread(target=self._read, args=(wid,)),
        ]
        self._is_reading = threading.Event()
        for thread in self._threads:
            thread.start()

    def _append(self) -> None:
        client = Api(self._api.url)
        try:
            while client.append("kept", [{"data": self.last + 1}]).status_code == 200:
                self.last += 1
        except httpx.TransportError:
            pass
        client.close()

    def _read(self, url: str) -> None:
        with httpx.Client(base_url=self._api.url, trust_env=False, timeout=60) as client:
            try:
                with client.stream("GET", url) as stream:
                    for _ in stream.iter_raw():
                        self._is_reading.set()
            except httpx.TransportError:
                pass

    def stop(self) -> tuple[int, float]:
        """SIGTERM while it writes."""
        assert self._is_reading.wait(START_WITHIN_S)
        eventually(lambda: self.last > 150, "appends are under way")
        ended = self._container.stop()
        for thread in self._threads:
            thread.join()
        self._api.close()
        return ended
