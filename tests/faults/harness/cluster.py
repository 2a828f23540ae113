"""Clusters of real processes: a standalone master and its workers, each with folders of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyspark
from launch import PATHS, SHORT_LIVES

from harness import processes

SPARK_HOME = Path(pyspark.__file__).parent
SECONDS = 60.0

LOOPBACK = tuple(((), f"127.0.0.{number}") for number in range(1, 9))

PATIENT = {
    "spark.task.maxFailures": "8",
    "spark.stage.maxConsecutiveAttempts": "20",
    "spark.excludeOnFailure.enabled": "false",
    # A reducer that meets a dead executor asks it so many times more: 5 s apart by default.
    "spark.shuffle.io.retryWait": "1s",
    # Tasks wait so long for an executor that had their data and is lost: 3 s by default.
    "spark.locality.wait.process": "1s",
    "spark.scheduler.revive.interval": "200ms",  # how often Spark sees whether they have: 1 s
}
"""Settings of a session whose executors are killed over and over."""


def local_cluster(executors: int, cores: int, megabytes: int = 1024) -> str:
    """The master URL of executors in processes of their own, which Spark itself starts and replaces."""
    return f"local-cluster[{executors},{cores},{megabytes}]"


@dataclass
class Worker:
    """A worker's process. Its executors, and their Python workers, are of its session of processes."""

    name: str
    folder: Path
    process: subprocess.Popen

    @property
    def pid(self) -> int:
        return self.process.pid

    def executors(self) -> list[int]:
        return [pid for pid in processes.of_session(self.pid) if processes.is_executor(pid)]

    def kill(self) -> None:
        """The whole machine, as it were: the worker, its executors and their Python workers."""
        processes.kill_session(self.pid)
        self.process.wait()

    def decommission(self) -> None:
        """What a cloud does before it takes a machine away: Spark's signal for it.

        The worker must have been started with ``spark.decommission.enabled``.
        """
        jvm = next(p for p in processes.of_session(self.pid) if _is(p, b".worker.Worker"))
        os.kill(jvm, signal.SIGPWR)


@dataclass
class Standalone:
    """A context manager: a master and ``workers`` workers of ``cores`` cores, all gone at its end.

    ``folder`` holds a folder for each worker: executors' working directories (a relative
    ``spark.sparkdl.slab.dir`` is inside), Spark's local directories, logs. ``settings``: of master
    and workers. ``environment``: variables of theirs. ``hosts``: for each worker (the first: the
    master's too) a command in front of its own, which puts it on a host, and that host's address; by
    default addresses of this machine's loopback device, since Spark runs a speculative twin on
    another host only.
    """

    workers: int
    cores: int
    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[tuple[Sequence[str], str]] = LOOPBACK
    environment: Mapping[str, str] = field(default_factory=dict)
    running: list[Worker] = field(default_factory=list, init=False)

    @property
    def url(self) -> str:
        return f"spark://{self.hosts[0][1]}:{self._port}"

    def __enter__(self) -> Standalone:
        self._names = itertools.count()
        self._port, self._page = _free_ports(2)
        arguments = ["--port", str(self._port), "--webui-port", str(self._page)]
        prefix, address = self.hosts[0]
        options = self._options({"spark.deploy.maxExecutorRetries": "-1", **self.settings})
        try:
            self._master = _start(
                [*prefix, *_command("master.Master"), "--host", address, *arguments],
                self.folder / "master",
                SPARK_MASTER_OPTS=options,
                SPARK_LOCAL_IP=address,
                **self.environment,
            )
            # A worker that comes before its master asks again only after 5 to 15 s.
            processes.wait_until(self.status, SECONDS, f"a master at {self.url}")
            for _ in range(self.workers):
                self._start_worker()
            self._wait_for(self.workers)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self.running:
            worker.kill()
        if hasattr(self, "_master"):
            processes.kill_session(self._master.pid)
            self._master.wait()

    def add_worker(self) -> Worker:
        """One more, known to the master."""
        expected = len(self.alive()) + 1
        worker = self._start_worker()
        self._wait_for(expected)
        return worker

    def alive(self) -> list[str]:
        """Addresses of the workers that the master takes for alive."""
        return [
            f"{worker['host']}:{worker['port']}"
            for worker in self.status().get("workers", [])
            if worker["state"] == "ALIVE"
        ]

    def status(self) -> dict[str, Any]:
        """What the master's page says; empty while there is none."""
        prefix, address = self.hosts[0]
        url = f"http://{address}:{self._page}/json/"
        try:
            if prefix:
                code = f"import urllib.request as u; print(u.urlopen({url!r}).read().decode())"
                found = subprocess.run(
                    [*prefix, sys.executable, "-c", code], capture_output=True, timeout=10
                ).stdout
            else:
                with urllib.request.urlopen(url, timeout=10) as page:
                    found = page.read()
            return json.loads(found)
        except (OSError, ValueError):
            return {}

    def _start_worker(self) -> Worker:
        number = next(self._names)
        prefix, address = self.hosts[number % len(self.hosts)]
        folder = self.folder / f"worker-{number}"
        arguments = ["--cores", str(self.cores), "--memory", "4g", "--work-dir", str(folder)]
        process = _start(
            [
                *prefix,
                *_command("worker.Worker"),
                *("--host", address, "--port", "0", "--webui-port", "0"),
                *arguments,
                self.url,
            ],
            folder,
            SPARK_WORKER_OPTS=self._options(self.settings),
            SPARK_LOCAL_DIRS=str(folder / "local"),
            SPARK_LOCAL_IP=address,
            **self.environment,
        )
        worker = Worker(f"worker-{number}", folder, process)
        self.running.append(worker)
        return worker

    @staticmethod
    def _options(settings: Mapping[str, str]) -> str:
        return " ".join(f"-D{key}={value}" for key, value in settings.items())

    def _wait_for(self, workers: int) -> None:
        processes.wait_until(
            lambda: len(self.alive()) >= workers, SECONDS, f"{workers} workers at {self.url}"
        )


def _command(name: str) -> list[str]:
    return [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]


def _start(command: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen:
    """A process that leads a session of its own; ``folder`` has what it prints."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={
                **os.environ,
                "SPARK_HOME": str(SPARK_HOME),
                "SPARK_DAEMON_MEMORY": "256m",
                "SPARK_DAEMON_JAVA_OPTS": SHORT_LIVES,
                "PYTHONPATH": os.pathsep.join([*PATHS, str(Path(__file__).parents[1])]),
                "PYSPARK_PYTHON": sys.executable,
                **environment,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _is(pid: int, name: bytes) -> bool:
    return any(part.endswith(name) for part in processes.command(pid))


def _free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to whoever asks for any: it would give these, too, before the
    master takes them."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = set[int]()
    while len(found) < count:
        port = random.randrange(10_000, first)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.add(port)
    return list(found)
