"""Python processes that need not import torch: each is a fork of one that has.

Spark's daemon of Python workers, and a script of a test, begin with imports that take ten seconds of a
processor; the suite starts a hundred of them. So each process of pytest starts one that has imported
everything, and ``PYSPARK_PYTHON`` is a program, ``forked_python.py``, that asks it for a fork with its
own arguments, environment, working directory, and standard streams. What runs in the fork is what
``python -m sparkdl.daemon`` or ``python SCRIPT`` runs. All other programs get an interpreter of their
own, as does one with another value of a variable that is read when a library is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

ADDRESS = "SPARKDL_TESTS_FORK_SERVER"
"""The variable with the path of the server's socket."""
READ_AT_START = ("OMP_NUM_THREADS", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONWARNINGS")
NAME = "python:"
"""The beginning of the name of a program that asked; the number of its fork follows."""
DAEMON = ["-m", "sparkdl.daemon"]


@functools.cache
def start() -> str:
    """Start the server of this process, and return the path of the program that asks it."""
    from launch import PATHS

    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    program = folder / "python"
    source = Path(__file__).with_name("forked_python.py").read_text()
    program.write_text(f"#!{sys.executable} -IS\n{source}")
    program.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        os.environ[ADDRESS] = str(folder / "socket")
        listener.bind(os.environ[ADDRESS])
        listener.listen(64)
        # As Spark sets it for the processes of its workers.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "PYTHONHASHSEED": "0"}
        subprocess.Popen(  # ends when this process does, and with it the pipe
            [sys.executable, __file__, str(listener.fileno()), str(folder)],
            stdin=subprocess.PIPE,
            env=environment,
            pass_fds=[listener.fileno()],
        )
    return str(program)


def parents() -> dict[int, int]:
    """Return the parent of each process that is there; that of a fork is whoever started the program
    that asked for it."""
    found, asked = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            found[int(entry.name)] = int(rest.split()[1])
            if name.startswith(NAME):
                asked[int(name.removeprefix(NAME))] = int(entry.name)
    return found | {fork: found[program] for fork, program in asked.items()}


class Server:
    """Forks for whoever connects, and tells each how its fork ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        paths = os.environ["PYTHONPATH"].split(os.pathsep)
        self._path = [path for path in sys.path[1:] if path not in paths]
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
        asked, streams = receive(connection)
        environment = asked.get("environment", {})
        if not asked or any(environment.get(n) != os.environ.get(n) for n in READ_AT_START):
            selector.unregister(connection)
            connection.close()
            for stream in streams:
                os.close(stream)
            return None
        script = asked["arguments"][:2] != DAEMON
        pid = os.fork()
        if pid:
            self._asked[pid] = connection, script
            selector.modify(connection, selectors.EVENT_READ, pid)
            with contextlib.suppress(OSError):  # killed meanwhile
                connection.sendall(f"{pid}\n".encode())
            for stream in streams:
                os.close(stream)
            return None
        if script:
            os.setsid()  # a daemon makes a group of its own
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in [connection, self._listener, *(c for c, _ in self._asked.values())]:
            other.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
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
    """Return what is asked, and the standard streams that came with it; nothing of a program that was
    killed while it asked."""
    begin, streams, _, _ = socket.recv_fds(connection, 8, 3)
    length, found = int.from_bytes(begin, "big"), b""
    while len(found) < length and (more := connection.recv(length - len(found))):
        found += more
    return json.loads(found) if found and len(found) == length else {}, list(streams)


def become(arguments: list[str], environment: dict[str, str], cwd: str, path: list[str]) -> None:
    """Run what ``python`` runs with these ``arguments``."""
    import numpy as np

    random.seed()
    np.random.seed()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if arguments[:2] == DAEMON:
        sys.argv, sys.path[:] = arguments[1:], [cwd, *path]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv, sys.path[:] = arguments, [str(Path(arguments[0]).parent.resolve()), *path]
    script = types.ModuleType("__main__")
    script.__file__ = arguments[0]
    sys.modules["__main__"] = script
    exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), script.__dict__)


def main() -> None:
    from sparkdl.daemon import MODULES, preload

    number, folder = sys.argv[1:]
    for module in ("launch", "pyspark.sql.connect.session", *MODULES):
        importlib.import_module(module)
    preload()
    server = Server(socket.socket(fileno=int(number)))
    asked = server.serve()
    if asked is not None:
        become(**asked)
        return
    for path in Path(folder).iterdir():
        path.unlink()
    Path(folder).rmdir()


if __name__ == "__main__":
    main()
