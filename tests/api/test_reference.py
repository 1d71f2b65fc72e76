"""The reference page and its files."""

from __future__ import annotations

import re

import pytest

from tests.api.conftest import Api
from tests.contract.driver import refused


@pytest.mark.anyio
async def test_the_page_loads_only_files_that_this_server_has(api: Api) -> None:
    page = await api.http.get("/v0/docs")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    files = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(files) == 4
    for name in files:
        assert re.fullmatch(r"docs/[a-z0-9.-]+", name)
        found = await api.http.get(f"/v0/{name}")
        assert found.status_code == 200
        assert found.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in found.headers["content-security-policy"]
        assert len(found.content) > 100


@pytest.mark.anyio
async def test_the_policy_names_no_other_host_and_no_inline_script(api: Api) -> None:
    page = await api.http.get("/v0/docs")
    rules = dict(
        rule.strip().partition(" ")[::2]
        for rule in page.headers["content-security-policy"].split(";")
    )
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["connect-src"] == "'self'"
    assert "://" not in page.headers["content-security-policy"]
    assert "<script>" not in page.text


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["index.html", "..", "swagger-ui.css.map", "%2e%2e%2fcore.py"])
async def test_no_other_file_of_the_package_is_served(api: Api, name: str) -> None:
    refused(await api.http.get(f"/v0/docs/{name}"), 404, "not_found")
