"""Program: forks processes that need not import torch, for :mod:`fork_server`."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import json
import os
import random
import runpy
import select
import selectors
import shutil
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

from fork_server import PATHS, STACKS, parents

READ_AT_START = (
    *("OMP_NUM_THREADS", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONWARNINGS"),
    "MALLOC_TRIM_THRESHOLD_",
)
MOST_FILES = 100
"""The most that a program has open."""
LIBRARIES = ("torch", "numpy", "pandas", "pyarrow", "pyspark")
"""What a fresh program need not import."""
MODELS_AND_METRICS = (
    *("torchmetrics", "peft", "transformers.models.bert.modeling_bert"),
    "torch._dynamo",  # compiles
)
"""What workers import for those of some tests, where it is installed."""


class Server:
    """Forks for whoever connects, and tells each how its fork ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        _, root, *paths = os.environ["PYTHONPATH"].split(os.pathsep)
        self._path = [root, *(path for path in sys.path[1:] if path not in (*PATHS, *paths))]
        self._asked: dict[int, tuple[socket.socket, bool]] = {}

    def serve(self) -> dict[str, Any] | None:
        """Return what a fork is to become, in the fork; None when the tests have ended."""
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            for source in (0, woken, self._listener):
                selector.register(source, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj == 0:
                        return None
                    if key.fileobj == woken:
                        os.read(woken, 512)
                        self._tell_of_the_ended(selector)
                    elif key.fileobj is self._listener:
                        connection = self._listener.accept()[0]
                        selector.register(connection, selectors.EVENT_READ)
                    elif key.data is None:
                        assert isinstance(key.fileobj, socket.socket)
                        asked = self._fork_for(key.fileobj, selector)
                        if asked is not None:
                            os.close(woken)
                            os.close(wakes)
                            return asked
                    else:  # the program that asked was killed
                        selector.unregister(key.fileobj)
                        self._end(key.data)

    def _fork_for(
        self, connection: socket.socket, selector: selectors.BaseSelector
    ) -> dict[str, Any] | None:
        asked, files = receive(connection)
        environment = asked.get("environment", {})
        if not asked or any(environment.get(n) != os.environ.get(n) for n in READ_AT_START):
            selector.unregister(connection)
            connection.close()
            for file in files:
                os.close(file)
            return None
        script = asked["arguments"][0] != "-m"
        pid = os.fork()
        if pid:
            self._asked[pid] = connection, script
            selector.modify(connection, selectors.EVENT_READ, pid)
            with contextlib.suppress(OSError):  # killed meanwhile
                connection.sendall(f"{pid}\n".encode())
            for file in files:
                os.close(file)
            return None
        if script:
            os.setsid()  # a daemon makes a group of its own
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in [connection, self._listener, *(c for c, _ in self._asked.values())]:
            other.close()
        asked["received"] = files
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        asked["path"] = [path for path in paths if path] + self._path
        return asked

    def _tell_of_the_ended(self, selector: selectors.BaseSelector) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid not in self._asked:  # the other server
                continue
            connection, script = self._asked[pid]
            if script:
                self._end(pid)
            with contextlib.suppress(KeyError):
                selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()
            del self._asked[pid]

    def _end(self, pid: int) -> None:
        """End a daemon, or a script with what it has started."""
        _, script = self._asked[pid]
        with contextlib.suppress(ProcessLookupError):
            if script:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGTERM)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return what is asked, and the files that came with it; nothing of a program that was killed while
    it asked."""
    begin, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
    length, found = int.from_bytes(begin, "big"), b""
    while len(found) < length and (more := connection.recv(length - len(found))):
        found += more
    return json.loads(found) if found and len(found) == length else {}, list(files)


def become(
    arguments: list[str],
    environment: dict[str, str],
    cwd: str,
    path: list[str],
    files: list[int],
    received: list[int],
) -> None:
    """Run what ``python`` runs with these ``arguments``. ``received`` are the files that it has as
    ``files``."""
    import numpy as np

    apart = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, MOST_FILES) for file in received]
    for file in received:
        os.close(file)
    for file, number in zip(apart, files, strict=True):
        os.dup2(file, number)
        os.close(file)
    faulthandler.register(STACKS, file=2)
    random.seed()
    np.random.seed()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if arguments[0] == "-m":
        sys.argv, sys.path[:] = arguments[1:], [cwd, *path]
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = types.ModuleType("__main__")
    sys.modules["__main__"] = script
    if arguments[0] == "-c":
        sys.argv, sys.path[:] = ["-c", *arguments[2:]], [cwd, *path]
        exec(compile(arguments[1], "<string>", "exec"), script.__dict__)
        return
    sys.argv, sys.path[:] = arguments, [str(Path(arguments[0]).parent.resolve()), *path]
    script.__file__ = arguments[0]
    exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), script.__dict__)


def main() -> None:
    folder, *numbers = sys.argv[1:]
    fresh, full = (socket.socket(fileno=int(number)) for number in numbers)
    if _is_asked(fresh, full):
        for module in LIBRARIES:
            importlib.import_module(module)
        if os.fork() == 0:
            fresh.close()
            if _is_asked(full):
                _import_everything()
                _serve(full)
            return
        full.close()
        if _serve(fresh):
            return
    shutil.rmtree(folder)


def _is_asked(*listeners: socket.socket) -> bool:
    """Wait until somebody connects; return False if the tests end before."""
    return 0 not in select.select([0, *listeners], [], [])[0]


def _import_everything() -> None:
    from sparkdl.daemon import MODULES, preload

    for module in ("launch", *MODULES):
        importlib.import_module(module)
    from sparkdl.slab import root

    root.parent = lambda pid: parents().get(pid)  # slabs are an executor's, not this process's
    for module in ("pyspark.sql.connect.session", *MODELS_AND_METRICS):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    preload()


def _serve(listener: socket.socket) -> bool:
    """Return False when the tests have ended, True in a fork that has done its work."""
    asked = Server(listener).serve()
    if asked is not None:
        become(**asked)
    return asked is not None


if __name__ == "__main__":
    main()
