"""Processes that are forked from one that has imported what ranks need."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

import fork_server


def forkserver() -> ForkServerContext:
    """Return the way to start them. There is one such server for all tests of a process."""
    start = multiprocessing.get_context("forkserver")
    start.set_executable(fork_server.start())
    start.set_forkserver_preload(
        ["torch._dynamo", "sparkdl.gang.rank_task", "sparkdl.engines.gang.engine"]
    )
    return start
