"""Checks compose.yaml as far as possible without an engine: the files that it names exist and
fit.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]

from tests.contract.driver import ROOT, Server
from tests.docker.image import only, stages
from topics_server.settings import Settings, variable

DOCKER: Final = ROOT / "docker"
MONITORING: Final = {"prometheus", "grafana"}
# The user makes these files, as the first lines of compose.yaml say.
MADE: Final = ("./tls", "./secrets/")

Json = dict[str, Any]


def read(path: str) -> Json:
    found: Json = yaml.safe_load((DOCKER / path).read_text())
    return found


COMPOSE: Final = read("compose.yaml")
SERVICES: Final[Json] = COMPOSE["services"]


def mounts(service: str) -> dict[str, str]:
    """The place of each mounted file or volume in a service's container."""
    found: dict[str, str] = {}
    for volume in SERVICES[service]["volumes"]:
        source, target = volume.split(":")[:2]
        found[target] = source
    return found


def mounted(service: str, path: str) -> Path:
    """Our file at a path in a service."""
    places = mounts(service)
    assert path in places, f"{service} has nothing at {path}"
    return DOCKER / places[path]


@pytest.mark.parametrize("service", SERVICES)
def test_each_mount_is_there(service: str) -> None:
    for target, source in mounts(service).items():
        assert target.startswith("/")
        if source.startswith("."):
            assert source.startswith(MADE) or (DOCKER / source).is_file(), source
        else:
            assert source in COMPOSE["volumes"], source


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_is_confined(service: str) -> None:
    given = SERVICES[service]
    assert given["read_only"] is True
    assert given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges:true"]
    assert {*given["networks"]} <= {*COMPOSE["networks"]}
    for secret in given.get("secrets", ()):
        assert COMPOSE["secrets"][secret]["file"] == f"./secrets/{secret}"
    for depended in given.get("depends_on", ()):
        assert depended in SERVICES


def test_only_nginx_is_reached_from_elsewhere() -> None:
    assert {name for name in SERVICES if SERVICES[name].get("profiles")} == MONITORING
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            assert name == "nginx" or port.startswith("127.0.0.1:"), port
        if service.get("ports"):
            # Docker publishes no port of an internal network.
            networks = [COMPOSE["networks"][each] for each in service["networks"]]
            assert any(not (network or {}).get("internal") for network in networks), name


def test_settings_and_secrets_that_the_server_is_given_exist() -> None:
    given = SERVICES["topics"]["environment"]
    assert {*given} <= {variable(field) for field in Settings.model_fields}
    secrets = {f"/run/secrets/{name}" for name in SERVICES["topics"]["secrets"]}
    assert given["TOPICS_API_KEYS_FILE"] in secrets
    assert SERVICES["topics"]["build"]["dockerfile"] == "docker/Dockerfile"
    grace_s = Settings.model_fields["shutdown_grace_ms"].default / 1000
    assert int(SERVICES["topics"]["stop_grace_period"].removesuffix("s")) > 2 * grace_s


def test_prometheus_scrapes_the_server_with_a_key_of_its_own() -> None:
    path = "/etc/prometheus/prometheus.yml"
    config = yaml.safe_load(mounted("prometheus", path).read_text())
    for rules in config["rule_files"]:
        assert mounted("prometheus", f"{Path(path).parent}/{rules}").is_file()
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert port in SERVICES[host]["expose"] == [only(stages()[1], "EXPOSE")]
    assert {*SERVICES[host]["networks"]} & {*SERVICES["prometheus"]["networks"]}
    secret = job["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    assert secret in SERVICES["prometheus"]["secrets"]


def test_the_scrape_is_answered_to_such_a_key(tmp_path: Path) -> None:
    """The key is made by the commands in the first lines of compose.yaml."""
    said = [line.lstrip("# ") for line in (DOCKER / "compose.yaml").read_text().splitlines()]
    lines = [
        line for line in said if ("scrape-key" in line and "openssl" in line) or "sed " in line
    ]
    assert len(lines) == 2
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "api-keys").touch(mode=0o600)
    script = "\n".join(lines).replace("sudo ", "")
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, check=True, timeout=60)
    key = (tmp_path / "secrets" / "scrape-key").read_text().strip()
    keys = str(tmp_path / "secrets" / "api-keys")
    server = Server(tmp_path / "server", {"TOPICS_API_KEYS_FILE": keys})
    api = server.start()
    (job,) = read("prometheus/prometheus.yml")["scrape_configs"]
    path = job["metrics_path"]
    assert api.http.get(path).status_code == 401
    headers = {"Authorization": f"{job['authorization']['type']} {key}"}
    assert "topics_ready 1" in api.http.get(path, headers=headers).text
    assert api.http.put("/v0/topics/t", json={}, headers=headers).status_code == 403
    server.stop()


def test_grafana_finds_its_source_and_the_dashboard() -> None:
    source = "/etc/grafana/provisioning/datasources/topics.yaml"
    (found,) = yaml.safe_load(mounted("grafana", source).read_text())["datasources"]
    assert found["isDefault"] is True
    url = urlsplit(found["url"])
    assert url.hostname in SERVICES
    assert f"127.0.0.1:{url.port}:{url.port}" in SERVICES[url.hostname]["ports"]
    assert {*SERVICES[url.hostname]["networks"]} & {*SERVICES["grafana"]["networks"]}
    provider = "/etc/grafana/provisioning/dashboards/topics.yaml"
    (found_provider,) = yaml.safe_load(mounted("grafana", provider).read_text())["providers"]
    folder = found_provider["options"]["path"]
    dashboard = json.loads(mounted("grafana", f"{folder}/topics.json").read_text())
    # A variable of this type selects the data source; without a choice it is the default one.
    (variable_,) = [v for v in dashboard["templating"]["list"] if v["type"] == "datasource"]
    assert variable_["query"] == found["type"]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {
        f"${{{variable_['name']}}}"
    }
    password = SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"]
    assert password.removeprefix("/run/secrets/") in SERVICES["grafana"]["secrets"]


def test_nginx_in_the_container_is_that_of_a_machine_but_for_address_and_logs(
    tmp_path: Path,
) -> None:
    """The test runs in-container.sh with its two paths in the test's folder and a program in place
    of nginx.
    """
    shell, script = SERVICES["nginx"]["entrypoint"]
    text = mounted("nginx", script).read_text()
    given = mounted("nginx", "/etc/nginx/topics.conf")
    made = tmp_path / "topics.conf"
    for old, new in (("/etc/nginx/topics.conf", given), ("/tmp/topics.conf", made)):
        assert text.count(old) == 1
        text = text.replace(old, str(new))
    (tmp_path / "nginx").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "nginx").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [shell, "-c", text]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "-g daemon off;\n"
    shipped, written = given.read_text().splitlines(), made.read_text().splitlines()
    changed = [(a, b) for a, b in zip(shipped, written, strict=True) if a != b]
    assert [b.split()[:2] for _, b in changed] == [
        ["server", "topics:4000;"],
        *(["access_log", "/dev/stdout"], ["error_log", "/dev/stderr"]) * 2,
    ]
    assert "/var/log" not in made.read_text()
    assert "include /tmp/topics.conf;" in mounted("nginx", "/etc/nginx/nginx.conf").read_text()


def test_the_documented_docker_run_names_existing_things() -> None:
    manual = (ROOT / "docs" / "OPERATIONS.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^    (docker run .+)$", manual, re.MULTILINE)
    words = shlex.split(line)
    final = stages()[1]
    assert words[-1] == SERVICES["topics"]["image"] == "topics-server"
    named = {words[i + 1].partition("=")[0] for i, word in enumerate(words) if word == "-e"}
    assert named <= {variable(field) for field in Settings.model_fields}
    (port,) = [words[i + 1] for i, word in enumerate(words) if word == "-p"]
    assert port == f"127.0.0.1:{only(final, 'EXPOSE')}:{only(final, 'EXPOSE')}"
    (volume,) = [words[i + 1] for i, word in enumerate(words) if word == "-v"]
    assert volume.partition(":")[2] == only(final, "VOLUME")
