"""Starts `topics` by a fork of a process that has its modules loaded: a tenth of a start's time.

For tests of what a server or a verb does. A test of how a process starts (its interpreter, its
path, a closed stream) starts a real process, and so does a test that sets other variables than
`TOPICS_` ones.

One parent for servers, one for the other verbs, each started when it is first needed and gone with
the test process. A start sends it arguments, environment, folder and open streams over a socket;
the child takes them over and runs `topics_server.__main__`. The caller gets a `Popen`: the parent
reaps the child and sends its exit code over a socket of the child's own.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import os
import resource
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final, NoReturn

ROOT: Final = Path(__file__).resolve().parents[1]
STREAMS: Final = ("stdin", "stdout", "stderr")
_parents: dict[str, socket.socket] = {}
_guard: Final = threading.Lock()


# -- the test's side -----------------------------------------------------------------------------


def start(
    words: list[str], env: dict[str, str], cwd: Path, **options: Any
) -> subprocess.Popen[bytes]:
    """Run `topics WORDS` and return its `Popen`; options as `Popen` has them."""
    if set(options) <= set(STREAMS) and _is_plain(env):
        return Forked(words, env, cwd, **options)
    command = [sys.executable, "-m", "topics_server", *words]
    process: subprocess.Popen[bytes] = subprocess.Popen(command, env=env, cwd=cwd, **options)
    return process


def _is_plain(env: dict[str, str]) -> bool:
    """Whether this environment equals that of the forking processes, apart from `TOPICS_`
    variables.
    """
    mine, source = dict(os.environ), str(ROOT / "src")
    mine["PYTHONPATH"] = os.pathsep.join(filter(None, (source, mine.get("PYTHONPATH", ""))))
    keys = mine.keys() | env.keys()
    return all(mine.get(k) == env.get(k) for k in keys if not k.startswith("TOPICS_"))


class Forked(subprocess.Popen[bytes]):
    """A process whose parent is another of ours."""

    def __init__(self, words: list[str], env: dict[str, str], cwd: Path, **streams: Any) -> None:
        self.args = ["topics", *words]
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self.encoding = self.errors = None
        self.text_mode = None
        self.pipesize = -1
        self._child_created = False  # before the first child there is nothing to reap
        self._communication_started = False
        self._input: bytes | None = None
        self._waitpid_lock = threading.Lock()
        self._sigint_wait_secs = 0.25
        given: list[int] = []
        closing: list[int] = []
        for number, name in enumerate(STREAMS):
            wanted = streams.get(name)
            if wanted == subprocess.PIPE:
                reading, writing = os.pipe()
                closing.append(reading if number == 0 else writing)
                mine = io.open(writing, "wb") if number == 0 else io.open(reading, "rb")  # noqa: SIM115, UP020
                setattr(self, name, mine)
                given.append(closing[-1])
            elif wanted == subprocess.DEVNULL:
                closing.append(os.open(os.devnull, os.O_RDWR))
                given.append(closing[-1])
            elif wanted == subprocess.STDOUT:
                given.append(given[1])
            elif wanted is None:
                given.append(number)
            else:
                given.append(wanted if isinstance(wanted, int) else wanted.fileno())
        self._told, theirs = socket.socketpair()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        request = json.dumps([words, env, os.fspath(cwd), limits]).encode(
            "utf-8", "surrogateescape"
        )
        with theirs, _guard:
            link = _parent("serve" if words[:1] == ["serve"] else "verbs")
            socket.send_fds(link, [struct.pack("I", len(request))], [*given, theirs.fileno()])
            link.sendall(request)
        for descriptor in closing:
            os.close(descriptor)
        self.pid = self._number()
        self._child_created = True

    def _number(self) -> int:
        told = self._told.recv(4, socket.MSG_WAITALL)
        assert len(told) == 4, "the parent of the forks is gone"
        (number,) = struct.unpack("i", told)
        assert isinstance(number, int)
        return number

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        self._end_within(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._end_within(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _end_within(self, timeout_s: float | None) -> None:
        """Take the exit code if it comes in time; several threads may wait for it."""
        if self.returncode is not None:
            return
        poller = select.poll()
        poller.register(self._told, select.POLLIN)
        if poller.poll(None if timeout_s is None else max(0.0, timeout_s * 1000)):
            with self._waitpid_lock:
                if self.returncode is None:
                    self.returncode = self._number()
                    self._told.close()


def _parent(kind: str) -> socket.socket:
    """The socket of the process that has the modules of this kind."""
    if kind not in _parents:
        mine, theirs = socket.socketpair()
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", kind, str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        _parents[kind] = mine

        @atexit.register
        def end() -> None:
            mine.close()
            process.wait()

    return _parents[kind]


# -- the parent of the forks ---------------------------------------------------------------------


def load(kind: str) -> None:
    """Import the modules that a process of this kind imports in time."""
    cli = importlib.import_module("topics_server.cli")
    importlib.import_module("topics_server.__main__")
    for verb in ["serve"] if kind == "serve" else [v for v in cli.VERBS if v != "serve"]:
        with contextlib.suppress(ImportError):  # the verbs that need pyarrow
            cli.main.get_command(None, verb)
    if kind == "serve":
        importlib.import_module("topics_server.server")
        importlib.import_module("uvloop")


def forking(link: socket.socket) -> list[str]:
    """Fork for each request, and return the arguments in the child. Ends with the test process."""
    ends: dict[int, socket.socket] = {}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the test process, and that this one
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        selector.register(reading, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == reading:
                    os.read(reading, 4096)
                    reap(ends)
                    continue
                head, given, _, _ = socket.recv_fds(link, 4, 4)
                if not head:
                    os._exit(0)
                size = struct.unpack("I", head)[0]
                request = json.loads(link.recv(size, socket.MSG_WAITALL))
                told = socket.socket(fileno=given[3])
                child = os.fork()
                if child:
                    for descriptor in given[:3]:
                        os.close(descriptor)
                    told.sendall(struct.pack("i", child))
                    ends[child] = told
                    continue
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for each in (link, told, *ends.values()):
                    each.close()
                for descriptor in (reading, writing):
                    os.close(descriptor)
                return become(request, given[:3])


def reap(ends: dict[int, socket.socket]) -> None:
    """Report every child that has ended."""
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with ends.pop(pid) as told, contextlib.suppress(OSError):
            told.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))


def become(request: list[Any], streams: list[int]) -> list[str]:
    """Take over the environment, the folder and the streams; the arguments."""
    words, env, folder, limits = request
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(limits))
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The streams are as Python makes them at its start: nothing is buffered, and no state of an
    # earlier file remains.
    sys.stdin = io.TextIOWrapper(opened(0, "rb"), "utf-8")
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(opened(1, "wb"), "utf-8", newline="\n")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # type: ignore[misc]
        opened(2, "wb"), "utf-8", "backslashreplace", "\n", line_buffering=True
    )
    return [str(word) for word in words]


def opened(descriptor: int, mode: str) -> Any:
    """A standard stream's file, which stays open."""
    return open(descriptor, mode, closefd=False)


def main(kind: str, descriptor: str) -> NoReturn:
    """Load, fork, and in each child run the verb."""
    load(kind)
    with socket.socket(fileno=int(descriptor)) as link:
        words = forking(link)
    sys.argv = ["topics", *words]
    from topics_server.__main__ import main as run

    run()
    raise SystemExit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
