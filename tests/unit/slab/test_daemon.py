"""The daemon of Spark's workers: what must hold before it forks."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import fork_server
import pytest

from sparkdl import daemon
from sparkdl.slab import root

SCRIPT = """
import gc, json, os, sys
from sparkdl import daemon
daemon.MODULES = (*daemon.MODULES, "asks_for_gpus")
daemon.preload()
threads = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
import torch
import asks_for_gpus
modules = set(sys.modules)
from sparkdl.engines.shuffle import update_tasks
from sparkdl.data import arrow_tasks, records
from sparkdl.slices.optimizer import take_step
parameter = torch.nn.Parameter(torch.zeros(3))
parameter.grad = torch.ones(3)
take_step(torch.optim.Adam([parameter]))
print(json.dumps({
    "threads": threads, "frozen": gc.get_freeze_count(), "tracked": len(gc.get_objects()),
    "collecting": gc.isenabled(), "cuda": torch.cuda.is_initialized(),
    "missing": [m for m in daemon.MODULES if m not in modules],
    "asked": [asks_for_gpus.found, asks_for_gpus.calls, os.environ.get(daemon.ASK_NVML)],
    "later": sorted(m for m in set(sys.modules) - modules if m.startswith(("sparkdl", "torch._dy"))),
}))
"""


def test_a_warning_is_shown_once_by_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(warnings, "showwarning", lambda *told: shown.append(told[2:]))
    daemon.show_warnings_once()
    for line in (1, 1, 2):
        warnings.showwarning("old name", DeprecationWarning, "library.py", line)
    assert shown == [("library.py", 1), ("library.py", 2)]


def test_the_socket_is_in_a_private_directory(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own have long names
    request.addfinalizer(lambda: shutil.rmtree(folder))
    registered = []
    monkeypatch.setattr(atexit, "register", lambda *call, **options: registered.append(call))
    monkeypatch.setenv(daemon.SOCKETS, str(folder))
    before = os.umask(0)
    try:
        daemon.use_private_directory()
    finally:
        os.umask(before)
    (made,) = folder.iterdir()
    assert os.environ[daemon.SOCKETS] == str(made)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    (mark,) = made.glob("alive.*")
    assert mark.name.split(".")[3] == str(os.getpid())
    root._sweep([folder])
    assert made.exists()
    mark.rename(made / mark.name.replace(str(os.getpid()), "1"))  # as of a daemon that was killed
    root._sweep([folder])
    assert not made.exists()
    assert registered == [(shutil.rmtree, str(made))]


def test_a_socket_with_a_long_path_stays_where_spark_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * daemon.LONGEST_PARENT)
    deep.mkdir()
    monkeypatch.setenv(daemon.SOCKETS, str(deep))
    daemon.use_private_directory()
    assert os.environ[daemon.SOCKETS] == str(deep)
    assert list(deep.iterdir()) == []


ASKS_FOR_GPUS = """
import torch
calls = []
torch._C._cuda_getDeviceCount = lambda: calls.append("started") or 1
torch.cuda._device_count_nvml = lambda: calls.append("asked") or 1
found = torch.cuda.is_available()
"""


@pytest.mark.linux
def test_what_is_forked_has_everything_and_runs_no_thread(tmp_path: Path) -> None:
    """A lock that a thread of the parent held would stay locked for ever in the child; and what is
    forked from a process that has started CUDA could not use it. No GPU is here: torch's own functions
    are told what one would say."""
    (tmp_path / "asks_for_gpus.py").write_text(ASKS_FOR_GPUS)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment.pop(daemon.ASK_NVML, None)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(result.stdout)
    assert len([name for name in found["threads"] if name != "jemalloc_bg_thd"]) == 1
    assert not found["cuda"]
    assert found["collecting"]
    assert found["frozen"] > 100_000 > found["tracked"]
    assert found["missing"] == found["later"] == []
    assert found["asked"] == [True, ["asked"], None]


FORKS = """
import json, os, sys, time
from sparkdl.daemon import give_workers_sessions
give_workers_sessions()
if os.fork() == 0:
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, str(os.getsid(0)).encode())
        os._exit(0)
    grandchild = int(os.read(read, 20))
    print(json.dumps([os.getpid(), os.getsid(0), grandchild]), flush=True)
    time.sleep(600)
sys.stdin.read()
"""


@pytest.mark.linux  # sessions share the processor there only
@pytest.mark.parametrize("end", [subprocess.Popen.kill, lambda daemon: daemon.stdin.close()])
def test_a_worker_is_a_session_and_ends_with_its_daemon(end: Any) -> None:
    """What a worker forks, such as processes that load data, belongs to its session."""
    parent = subprocess.Popen(
        [fork_server.fresh(), "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        worker, its_session, grandchilds = json.loads(parent.stdout.readline())
        assert worker == its_session == grandchilds
        assert worker != os.getsid(0)
        end(parent)
        assert parent.stdout.read() == ""  # the worker has it open for as long as it lives
