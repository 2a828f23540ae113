"""Processes of hosted ranks."""

from __future__ import annotations

import os
from pathlib import Path

from sparkdl.gang.oversubscribe import MODULE

RUN = "SPARKDL_TEST_RUN"
"""Environment variable, of one value in all processes of a test run: others may test beside it."""


def hosted_ranks() -> list[int]:
    """Those of this test run that are there, whoever their parent is."""
    ours = f"{RUN}={os.environ[RUN]}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (
                (entry / name).read_bytes().split(b"\0") for name in ("cmdline", "environ")
            )
        except OSError:
            continue
        if MODULE.encode() in command and ours in environment:
            found.append(int(entry.name))
    return found
