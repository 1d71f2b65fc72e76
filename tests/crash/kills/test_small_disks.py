"""A disk that is full to its last byte, with default settings, is emptied through the API alone.

A real server on a real file system of its own: appends fill it, then a foreign file up to the last
byte, which stays there. The test deletes everything, or drops the topic, and the server accepts
appends again within ten seconds, without a restart. `--disk-mib` sets the size.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.contract.driver import Api, Json, Server, eventually, good, refused

_WITHIN_S = 10
# After this many refusals in a row, a quarter of a second apart, no checkpoint makes room any more.
_REFUSALS = 12
_LIMITS = ("disk", "min_free_bytes", "unsealed")


@contextlib.contextmanager
def _mounted(kind: str, folder: Path, mib: int) -> Iterator[Path]:
    """Mount a file system; skip where this process may not mount one."""
    target = folder / "disk"
    target.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    if kind == "tmpfs":
        options = f"size={mib}m,mode=700".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"tmpfs", bytes(target), b"tmpfs", 0, options) != 0:
            pytest.skip(f"tmpfs cannot be mounted: {os.strerror(ctypes.get_errno())}")
    else:
        maker, mount = shutil.which("mkfs.ext4"), shutil.which("mount")
        if maker is None or mount is None:
            pytest.skip("there is no mkfs.ext4 or mount here")
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(mib << 20)
        subprocess.run([maker, "-q", "-m", "0", str(image)], check=True, timeout=60)
        told = subprocess.run(
            [mount, "-o", "loop", str(image), str(target)],
            capture_output=True,
            timeout=60,
            check=False,
        )
        if told.returncode != 0:
            pytest.skip(f"no loop mount: {told.stderr.decode().strip()}")
    try:
        yield target
    finally:
        ctypes.CDLL(None).umount2(bytes(target), 2)


def _fill(api: Api, size: int) -> int:
    """Append records of `size` bytes until the server keeps refusing; return the number of accepted
    ones.
    """
    taken = refusals = 0
    message = ""
    while refusals < _REFUSALS:
        answer = api.append("big", [{"data": secrets.token_hex(size // 2)}])
        if answer.status_code == 429:
            # The server also bounds records that it cannot seal.
            assert refused(answer, 429, "throttled")["limit"] in _LIMITS
            refusals += 1
            message = answer.json()["error"]["message"]
            time.sleep(0.25)
        else:
            good(answer)
            taken += 1
            refusals = 0
    assert "disk" in message, "the cause of the last refusal"
    return taken


def _ready(api: Api) -> Json:
    """The answer of `/v0/ready`: 200 also while a background operation fails."""
    return good(api.http.get("/v0/ready"))


@contextlib.contextmanager
def _told_on_failure(server: Server, disk: Path) -> Iterator[None]:
    """On a failure, print what a person needs to find its cause: the server's own reasons, its
    last refusal, its log and what is on the disk.
    """
    try:
        yield
    except BaseException:
        found = os.statvfs(disk)
        print(f"\nfree: {found.f_bavail * found.f_frsize} bytes")
        for path in ("/v0/ready", "/v0/topics/big", "/v0/topics/kept"):
            with contextlib.suppress(httpx.HTTPError):
                print(f"{path}: {server.api.http.get(path).text}")
        with contextlib.suppress(httpx.HTTPError):
            answer = server.api.append("kept", [{"data": "why not"}])
            print(f"append: {answer.status_code} {answer.text}")
        print(f"its log:\n{server.log.read_text(errors='replace')}")
        for file in sorted(disk.rglob("*")):
            with contextlib.suppress(OSError):
                told = file.stat()
                print(f"{told.st_size:>12} {told.st_blocks * 512:>12} {file.relative_to(disk)}")
        raise


def _fill_to_the_last_byte(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(secrets.token_bytes(size))
            except OSError:
                size //= 2


@pytest.fixture
def mib(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--disk-mib", default=32))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["delete", "drop"])
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_full_to_its_last_byte_is_emptied_through_the_api(
    tmp_path: Path, kind: str, how: str, mib: int
) -> None:
    with _mounted(kind, tmp_path, mib) as disk:
        server = Server(tmp_path / "server", {"TOPICS_DATA_DIR": str(disk / "data")})
        try:
            api = server.start()
            with _told_on_failure(server, disk):
                good(api.put("kept", {"durability": "fsync"}))
                for number in range(30):
                    api.add("kept", number)
                taken = _fill(api, 100_000) + _fill(api, 1_000)
                _fill_to_the_last_byte(disk / "somebody's file")
                found = os.statvfs(disk)
                assert found.f_bavail * found.f_frsize < 4096
                time.sleep(3)
                assert api.append("kept", [{"data": "no room"}]).status_code == 429
                eventually(lambda: _ready(api)["status"] == "degraded", "it is told", _WITHIN_S)
                print(f"\n{_ready(api)['reasons']}")
                good(api.delete("big", before_seq=10**9) if how == "delete" else api.drop("big"))
                began = time.monotonic()
                eventually(
                    lambda: api.append("kept", [{"data": 30}]).status_code == 200,
                    "appends are taken again",
                    within_s=_WITHIN_S,
                )
                print(
                    f"\n{kind} {mib} MiB, {how}: {taken} records, {time.monotonic() - began:.1f} s"
                )
                eventually(lambda: _ready(api)["status"] == "ready", "nothing fails", _WITHIN_S)
                print(f"\nready {time.monotonic() - began:.1f} s after it")
                for _ in range(20):
                    good(api.append("kept", [{"data": "y" * 10_000}]))
                api = server.crash()
                assert [r["data"] for r in api.read_all("kept")][:31] == list(range(31))
                assert len(api.read_all("kept")) == 51
        finally:
            if server.process is not None:
                server.stop()
