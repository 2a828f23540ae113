"""Two hosts on one machine: network and mount namespaces, and a cable between them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from harness import processes

DEVICE = "cable"


class NotAllowed(Exception):
    """This machine lets nobody, or not this user, make namespaces; says why."""


@dataclass
class TwoHosts:
    """A context manager: hosts 0 and 1, each with an address, a loopback device, a /dev/shm of its own,
    and one of ``folders`` that the other one does not see. Linux, as root, with iproute2.

    Raises :class:`NotAllowed`. The namespaces live as long as a process in them.
    """

    folders: tuple[Path, Path]
    addresses: tuple[str, str] = ("10.213.0.1", "10.213.0.2")
    _holders: list[subprocess.Popen] = field(default_factory=list)

    def __enter__(self) -> TwoHosts:
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            printed = (getattr(error, "stderr", "") or "").strip()
            raise NotAllowed(f"no namespaces here: {error} {printed}") from None
        return self

    def __exit__(self, *exc_info: object) -> None:
        for holder in self._holders:
            processes.kill_session(holder.pid)
            holder.wait()

    def inside(self, host: int) -> list[str]:
        """What stands in front of a command that shall run on ``host``."""
        return ["nsenter", f"--target={self._holders[host].pid}", "--mount", "--net"]

    def run(self, host: int, *command: str) -> str:
        return _run(*self.inside(host), *command)

    @contextlib.contextmanager
    def cut(self):
        """The cable is out, inside the block."""
        self.run(1, "ip", "link", "set", DEVICE, "down")
        try:
            yield
        finally:
            self.run(1, "ip", "link", "set", DEVICE, "up")

    def _make(self) -> None:
        own = _namespaces(os.getpid())
        for _ in range(2):
            command = ["unshare", "--mount", "--net", "sleep", "infinity"]
            holder = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
            self._holders.append(holder)
        for holder in self._holders:
            deadline = time.monotonic() + 10
            while holder.poll() is None and set(_namespaces(holder.pid)) & set(own):
                if time.monotonic() > deadline:
                    raise OSError("unshare takes too long")
                time.sleep(0.01)
            if holder.poll() is not None:
                raise OSError(f"unshare --mount --net ended with status {holder.returncode}")
        ends = [("netns", str(holder.pid), "name", DEVICE) for holder in self._holders]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host, address in enumerate(self.addresses):
            self.run(host, "ip", "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                self.run(host, "ip", "link", "set", device, "up")
            others = self.folders[1 - host]
            others.mkdir(parents=True, exist_ok=True)
            for place in ("/dev/shm", str(others)):
                self.run(host, "mount", "-t", "tmpfs", "tmpfs", place)


def _namespaces(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "mnt")]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout
