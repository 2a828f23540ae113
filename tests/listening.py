"""What the Python processes of a Spark application listen on, as the kernel tells (Linux)."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fork_server

LISTENS, UNBOUND = "0A", "0000"


@dataclass
class Found:
    """``ports``: "ROLE PROTOCOL ADDRESS" of any port. ``sockets``: of a Unix socket that a role
    listens on, the modes of the socket and of its directory. ``roles``: all that were there."""

    roles: set[str] = field(default_factory=set)
    ports: set[str] = field(default_factory=set)
    sockets: set[tuple[str, int, int]] = field(default_factory=set)
    looks: int = 0


@contextlib.contextmanager
def watching(seconds: float = 0.1) -> Iterator[Found]:
    """Look again and again, from a thread, while the block runs."""
    found, done = Found(), threading.Event()

    def look() -> None:
        while not done.wait(seconds):
            _look(found)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _look(found: Found) -> None:
    ports, sockets = _ports(), _unix_sockets()
    for pid, role in _roles().items():
        found.roles.add(role)
        for inode in _inodes(pid):
            if inode in ports:
                found.ports.add(f"{role} {ports[inode]}")
            elif inode in sockets:
                with contextlib.suppress(FileNotFoundError):
                    path = sockets[inode]
                    modes = [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)]
                    found.sockets.add((role, modes[0], modes[1]))
    found.looks += 1


def _roles() -> dict[int, str]:
    """Process -> role, of this process ("driver") and the Python processes below it."""
    parents, names = fork_server.parents(), {}
    for pid in parents:
        with contextlib.suppress(OSError):
            names[pid] = Path(f"/proc/{pid}/comm").read_text()
    roles = {os.getpid(): "driver"}
    for pid in parents:
        line, above = [pid], pid
        while above in parents and above != os.getpid():
            above = parents[above]
            line.append(above)
        if above == os.getpid() and pid != above and names.get(pid, "").startswith("python"):
            roles[pid] = "worker" if names.get(line[1], "").startswith("python") else "daemon"
    return roles


def _inodes(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for handle in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(handle.path).partition(":[")
                if kind == "socket":
                    yield int(inode.rstrip("]"))


def _ports() -> dict[int, str]:
    """Inode -> protocol and address, of TCP sockets that listen and UDP sockets with a port."""
    found = {}
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        with contextlib.suppress(FileNotFoundError):
            for row in _rows(f"/proc/net/{protocol}"):
                udp = protocol.startswith("udp")
                if row[3] == LISTENS or (udp and row[1].rpartition(":")[2] != UNBOUND):
                    found[int(row[9])] = f"{protocol} {row[1]}"
    return found


def _unix_sockets() -> dict[int, Path]:
    """Inode -> path, of the Unix sockets that accept connections."""
    accepts = 0x10000
    rows = _rows("/proc/net/unix")
    return {int(r[6]): Path(r[7]) for r in rows if len(r) > 7 and int(r[3], 16) & accepts}


def _rows(path: str) -> list[Any]:
    return [line.split() for line in Path(path).read_text().splitlines()[1:]]
