"""``pyspark.daemon``, which forks the Python workers, without its traceback for an idle worker.

Spark closes the socket of a worker that was idle for a minute, and of every worker as a session
stops. With Unix domain sockets the worker then finds the pipe broken while it says goodbye, and
pyspark.daemon prints a traceback for what is no error. Named by ``spark.python.daemon.module``.
"""

from __future__ import annotations

import socket

from pyspark import daemon

_worker = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Serve tasks until the JVM hangs up."""
    try:
        return _worker(sock, authenticated)
    except BrokenPipeError:
        return 1  # leave, as after any end of the connection


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
