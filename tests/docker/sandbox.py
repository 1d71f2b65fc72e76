"""Runs a command under the system-call rules of our systemd unit, without systemd.

It computes the rules from the unit file and from systemd's own lists of call sets. As a program,
`python sandbox.py UNIT COMMAND ...` installs the rules in its own process and becomes the command.
A call that the unit does not list ends the process with SIGSYS, although the unit itself only
answers EPERM: so a test notices a missing call.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

INSTALL: Final = "no systemd-analyze or libseccomp here; on Debian: apt-get install systemd"
# Constants of <seccomp.h>, <sys/mman.h> and <sys/prctl.h>.
_KILL_PROCESS: Final = 0x80000000
_ALLOW: Final = 0x7FFF0000
_EPERM: Final = 0x00050000 | 1
_MASKED_EQUAL: Final = 7
_PROT_WRITE, _PROT_EXEC = 2, 4
_PR_SET_NO_NEW_PRIVS: Final = 38


class _Compare(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def is_available() -> bool:
    """Whether the lists and the library are installed."""
    return bool(shutil.which("systemd-analyze") and ctypes.util.find_library("seccomp"))


def call_sets() -> dict[str, list[str]]:
    """Systemd's sets by name (`@system-service`), each with its members; sets may name sets."""
    done = subprocess.run(
        ["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True
    )
    sets: dict[str, list[str]] = {}
    current: list[str] = []
    for line in done.stdout.splitlines():
        if line.startswith("@"):
            current = sets.setdefault(line.strip(), [])
        elif line.startswith(" ") and not line.strip().startswith("#"):
            current.append(line.strip())
    return sets


def expanded(names: list[str], sets: dict[str, list[str]]) -> set[str]:
    """The calls of names of calls and sets."""
    found: set[str] = set()
    for name in names:
        found |= expanded(sets[name], sets) if name.startswith("@") else {name}
    return found


def allowed_calls(unit: str, sets: dict[str, list[str]]) -> set[str]:
    """The calls that a unit allows. Its `SystemCallFilter=` lines apply in order; `~` removes
    calls.
    """
    allowed = expanded(["@default"], sets)
    lines = [line.partition("=") for line in unit.splitlines()]
    for value in [value for name, _, value in lines if name == "SystemCallFilter"]:
        if value.startswith("~"):
            allowed -= expanded(value[1:].split(), sets)
        else:
            allowed |= expanded(value.split(), sets)
    return allowed


def confine(allowed: set[str], *, deny_write_execute: bool) -> None:
    """Restrict this process and its children to these calls; it cannot be undone."""
    library = ctypes.CDLL(ctypes.util.find_library("seccomp"), use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_KILL_PROCESS)))
    for name in sorted(allowed):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # a call of another architecture has no number
            _add(library, context, _ALLOW, number)
    if deny_write_execute:
        both = _PROT_WRITE | _PROT_EXEC
        for name, mask in (("mmap", both), ("mprotect", _PROT_EXEC)):
            number = library.seccomp_syscall_resolve_name(name.encode())
            _add(library, context, _EPERM, number, _Compare(2, _MASKED_EQUAL, mask, mask))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert library.seccomp_load(context) == 0


def _add(
    library: ctypes.CDLL,
    context: ctypes.c_void_p,
    action: int,
    number: int,
    compare: _Compare | None = None,
) -> None:
    arguments = [] if compare is None else [compare]
    result = library.seccomp_rule_add_array(
        context,
        ctypes.c_uint32(action),
        ctypes.c_int(number),
        ctypes.c_uint(len(arguments)),
        ctypes.byref(arguments[0]) if arguments else None,
    )
    assert result == 0, (number, result)


def main() -> None:
    """Restrict this process by the unit, then become the command."""
    unit = Path(sys.argv[1]).read_text()
    confine(
        allowed_calls(unit, call_sets()),
        deny_write_execute="MemoryDenyWriteExecute=yes" in unit.splitlines(),
    )
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
