"""The daemon of Spark's workers: what must hold before it forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import gc, json, os, sys
from sparkdl.daemon import MODULES, preload
preload()
threads = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
import torch
modules = set(sys.modules)
from sparkdl.step import job
from sparkdl.data import records, tables
parameter = torch.nn.Parameter(torch.zeros(3))
torch.optim.Adam([parameter])
print(json.dumps({
    "threads": threads, "frozen": gc.get_freeze_count(), "tracked": len(gc.get_objects()),
    "collecting": gc.isenabled(), "cuda": torch.cuda.is_initialized(),
    "missing": [m for m in MODULES if m not in modules],
    "later": sorted(m for m in set(sys.modules) - modules if m.startswith(("sparkdl", "torch._dy"))),
}))
"""


def test_what_is_forked_has_everything_and_runs_no_thread() -> None:
    """A lock that a thread of the parent held would stay locked for ever in the child."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(result.stdout)
    assert len([name for name in found["threads"] if name != "jemalloc_bg_thd"]) == 1
    assert not found["cuda"]
    assert found["collecting"]
    assert found["frozen"] > 100_000 > found["tracked"]
    assert found["missing"] == found["later"] == []
