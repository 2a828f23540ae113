"""The daemon of PySpark's workers, under a limit on private writable memory that the kernel enforces.

Spark starts it as ``spark.python.daemon.module``; the workers it forks inherit the limit (bytes, in
the environment variable ``PRIVATE_MEMORY``). RLIMIT_DATA counts what is private and writable,
whether touched or not, and leaves out files that are mapped: an allocation beyond it fails with
MemoryError. ``spark.executor.pyspark.memory`` will not do here, since it limits the address space,
mapped files included.
"""

from __future__ import annotations

import os
import resource

from pyspark import daemon

if __name__ == "__main__":
    limit = int(os.environ["PRIVATE_MEMORY"])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    daemon.manager()
