"""Program in the place of ``python``: the server of :mod:`fork_server` runs it, where that can.

It imports next to nothing. Its name tells the number of its fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys


def ask() -> None:
    """Exit as the fork does; return if there is none."""
    asked = {"arguments": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}
    message = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["SPARKDL_TESTS_FORK_SERVER"])
        socket.send_fds(connection, [len(message).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(message)
        with connection.makefile() as answers:
            pid = answers.readline()
            if not pid:
                return
            with open("/proc/self/comm", "w") as name:
                name.write(f"python:{pid}")
            for stream in (0, 1, 2):  # those of the fork alone: whoever reads them sees its end
                os.close(stream)
            status = int(answers.readline() or 1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if sys.argv[1:3] == ["-m", "sparkdl.daemon"] or sys.argv[1].endswith(".py"):
    with contextlib.suppress(OSError):
        ask()
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
