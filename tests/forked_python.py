"""Program in the place of ``python``: ``serve_forks.py`` runs it, where that can.

It imports next to nothing. Its name tells the number of its fork. That of a script gets its interrupts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys


def ask(address: str, arguments: list[str]) -> None:
    """Exit as the fork does; return if there is none."""
    files = [0, 1, 2, *filter(is_inherited, range(3, MOST_FILES))]
    asked = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "files": files,
    }
    message = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [len(message).to_bytes(8, "big")], files)
        connection.sendall(message)
        with connection.makefile() as answers:
            pid = answers.readline()
            if not pid:
                return
            with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
                name.write(f"python:{pid}")
            if is_script(arguments):
                signal.signal(signal.SIGINT, lambda *_: os.kill(int(pid), signal.SIGINT))
            for file in files:  # those of the fork alone: whoever reads them sees its end
                os.close(file)
            status = int(answers.readline() or 1)
    if status < 0:
        with contextlib.suppress(OSError):  # nothing may handle SIGKILL
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


MOST_FILES = 100
"""The number from which on no file is looked for."""


def is_inherited(file: int) -> bool:
    with contextlib.suppress(OSError):
        return os.get_inheritable(file)
    return False


def is_script(arguments: list[str]) -> bool:
    return arguments[0].endswith(".py")


folder, server = os.path.split(sys.argv[0])
if sys.argv[1:3] == ["-m", "pyspark.daemon"]:
    server = "fresh"  # its workers import sparkdl themselves
of_multiprocessing = "".join(sys.argv[2:3]).startswith("from multiprocessing.forkserver import")
if (
    server == "fresh"
    or is_script(sys.argv[1:])
    or sys.argv[1:3] == ["-m", "sparkdl.daemon"]
    or of_multiprocessing
):
    with contextlib.suppress(OSError):
        ask(f"{folder}/{server}.socket", sys.argv[1:])
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
