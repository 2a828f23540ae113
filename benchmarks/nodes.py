"""Nodes of one machine: network namespaces with a network between them as slow as is wanted.

Linux, as root, with ``ip`` and ``tc``. Each node has its own loopback, its own ``/dev/shm`` and one
network card, whose traffic in either direction a token bucket (tc-tbf) limits; all share the processor.
The driver is a node too, behind a card without a limit. Everything ends with the process that made it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyspark

DRIVER, CARD, SUBNET = "10.77.0.1", "card0", "10.77.0"
BURST, QUEUE = 1 << 19, 1 << 23
"""Bytes: a bucket holds some of the largest packets that the kernel forms; nothing is dropped."""
MASTER = f"spark://{DRIVER}:7077"
SETTINGS = {
    "spark.driver.host": DRIVER,
    "spark.driver.bindAddress": DRIVER,
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
}
"""Of a session whose driver the nodes reach, and which waits for ``spark.cores.max`` of them."""
_INSIDE = "SPARKDL_BENCHMARK_NODES"


def enter() -> None:
    """Go on in namespaces of this process's own: the script starts anew there, once.

    Raises SystemExit where this machine lacks what that takes.
    """
    if os.environ.get(_INSIDE):
        _run("ip", "link", "set", "lo", "up")
        _run("mount", "-t", "tmpfs", "none", "/run")
        return
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if os.geteuid() or missing:
        raise SystemExit(
            f"this benchmark needs Linux, root, ip, tc and unshare (missing: {missing})"
        )
    inside = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    os.environ[_INSIDE] = "yes"
    os.execvp(inside[0], [*inside, sys.executable, *sys.argv])


@dataclass(frozen=True)
class Node:
    """The ``number``-th, from 0."""

    number: int

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number + 2}"

    def start(
        self, command: Sequence[str], cwd: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        """A program on this node; what it says goes to a file in ``cwd``."""
        shell = 'mount -t tmpfs none /dev/shm && exec "$@"'
        with (cwd / f"{self.name}.log").open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, "sh", "-c", shell, "sh", *command],
                cwd=cwd,
                env={**os.environ, "SPARK_LOCAL_IP": self.address, **environment},
                stdout=log,
                stderr=log,
            )


@contextlib.contextmanager
def network(count: int, mbit: float | None) -> Iterator[list[Node]]:
    """``count`` nodes whose cards send and receive ``mbit`` million bits a second (None: as fast as
    the processor copies)."""
    _run("ip", "link", "add", "bridge0", "type", "bridge")
    _run("ip", "address", "add", f"{DRIVER}/24", "dev", "bridge0")
    _run("ip", "link", "set", "bridge0", "up")
    nodes = [Node(number) for number in range(count)]
    for node in nodes:
        port = f"port{node.number}"
        _run("ip", "netns", "add", node.name)
        inside = ("ip", "-n", node.name)
        _run("ip", "link", "add", port, "type", "veth", "peer", CARD, "netns", node.name)
        _run("ip", "link", "set", port, "master", "bridge0", "up")
        _run(*inside, "address", "add", f"{node.address}/24", "dev", CARD)
        for card in ("lo", CARD):
            _run(*inside, "link", "set", card, "up")
        if mbit is not None:
            limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", str(BURST), "limit", str(QUEUE))
            _run("tc", "qdisc", "add", "dev", port, *limit)
            _run("tc", "-n", node.name, "qdisc", "add", "dev", CARD, *limit)
    try:
        yield nodes
    finally:
        for node in nodes:  # a namespace lives as long as a process in it
            _run("ip", "link", "delete", f"port{node.number}")
            _run("ip", "netns", "delete", node.name)
        _run("ip", "link", "delete", "bridge0")


@contextlib.contextmanager
def cluster(nodes: Sequence[Node], folder: Path, cores: int, memory: str) -> Iterator[str]:
    """A standalone Spark cluster, its master beside the driver, a worker of ``cores`` on each node;
    the master's address."""
    home = Path(pyspark.__file__).parent
    program = str(home / "bin" / "spark-class")
    quiet = {"SPARK_HOME": str(home), "SPARK_LOG_DIR": str(folder)}
    kind = "org.apache.spark.deploy"
    with (folder / "master.log").open("wb") as log:
        master = subprocess.Popen(
            [program, f"{kind}.master.Master", "--host", DRIVER, "--webui-port", "0"],
            env={**os.environ, **quiet, "SPARK_LOCAL_IP": DRIVER},
            stdout=log,
            stderr=log,
        )
    workers = []
    try:
        for node in nodes:
            own = folder / node.name
            own.mkdir()
            size = ["--cores", str(cores), "--memory", memory, "--work-dir", str(own)]
            command = [program, f"{kind}.worker.Worker", *size, "--webui-port", "0", MASTER]
            workers.append(node.start(command, own, **quiet))
        yield MASTER
    finally:
        end([master, *workers])


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask them to, then make them."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    until = time.monotonic() + 10
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
