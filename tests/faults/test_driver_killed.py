"""The driver is killed in the middle of a run; ``resume="latest"`` ends with the bits of one run."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kill_the_driver
import pytest
from launch import launch
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from sparkdl.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = Path(kill_the_driver.__file__)

# Workers of the session in this process cannot import the script.
cloudpickle.register_pickle_by_value(sys.modules["kill_the_driver"])


@pytest.fixture(scope="module")
def undisturbed(spark) -> dict:
    return kill_the_driver.fit(kill_the_driver.frame(spark), "local")


def run(folder: Path, case: str, hold: int = 0, master: str = "local[2]") -> dict:
    told, checkpoints = str(folder / "told"), str(folder / "checkpoints")
    return launch(
        SCRIPT, folder, master=master, checkpoints=checkpoints, told=told, case=case, hold=hold
    )


def go_on(spark: SparkSession, folder: Path, case: str) -> dict:
    """Another driver takes the run up: this process, in the session of the tests."""
    data, places = kill_the_driver.frame(spark), (folder / "checkpoints", folder / "told")
    return kill_the_driver.fit(data, case, *places, resume="latest")


def run_and_kill(
    folder: Path,
    case: str,
    until: str,
    seconds: float = 0.0,
    hold: int = 0,
    master: str = "local[2]",
) -> None:
    """Start the script, and kill its process ``seconds`` after it told ``until``."""
    folder.mkdir(exist_ok=True)
    told = folder / "told"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, folder, case, hold, master)
        deadline = time.monotonic() + 300
        while not (told.exists() and until in told.read_text().splitlines()):
            assert time.monotonic() < deadline
            assert not running.done(), running.result()
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(_driver(folder), signal.SIGKILL)
        with pytest.raises(AssertionError):  # it gave no answer
            running.result()


def _driver(folder: Path) -> int:
    """The process that runs the script in ``folder``: by its working directory and parent."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            ours = str(SCRIPT).encode() in line and parent == os.getpid()
            if ours and Path(os.readlink(entry / "cwd")) == folder:
                return int(entry.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    raise AssertionError("the script's process is not there")


def starts(folder: Path) -> list[int]:
    lines = (folder / "told").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("start")]


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["local", "shuffle"])
def test_killed_at_some_moment_between_two_checkpoints(spark, undisturbed, tmp_path, engine):
    draw = random.Random()
    until, seconds = f"iteration {draw.randint(5, 12)}", draw.random() * 0.1
    folder = tmp_path / "run"
    run_and_kill(folder, engine, until, seconds, hold=16)  # it does not end before
    assert go_on(spark, folder, engine) == undisturbed, (until, seconds)
    first, second = starts(folder)
    assert first == 0
    assert second % 4 == 0
    assert second >= 4


@pytest.mark.soak
@pytest.mark.parametrize("case", [case for case in kill_the_driver.CASES if case != "local"])
def test_killed_in_the_second_checkpoint(spark, tmp_path, case):
    folder = tmp_path / "run"
    run_and_kill(folder, case, "held", hold=8)
    found = go_on(spark, folder, case)
    assert starts(folder) == [0, 4]
    assert found == kill_the_driver.fit(kill_the_driver.frame(spark), case)


@pytest.mark.soak
def test_killed_while_slices_are_there_and_the_manifest_is_not(spark, undisturbed, tmp_path):
    folder = tmp_path / "run"
    run_and_kill(folder, "shuffle", "held", hold=12)
    store = CheckpointStore(folder / "checkpoints")
    assert [manifest.iteration for _, manifest in store.candidates()] == [8, 4]
    ((uri, reason),) = [(skipped.uri, skipped.reason) for skipped in store.skipped]
    assert "iteration-0000000012" in uri
    assert reason == "it has no manifest, so it was never completed"
    assert len(list(Path(uri).glob("slice-*"))) == 2
    assert go_on(spark, folder, "shuffle") == undisturbed
    assert starts(folder) == [0, 8]
    assert not Path(uri).exists()  # pruned
    assert [manifest.iteration for _, manifest in store.candidates()] == [20, 16]


@pytest.mark.soak
def test_killed_in_the_first_checkpoint(spark, undisturbed, tmp_path):
    """There is none to go on from: it begins anew."""
    folder = tmp_path / "run"
    run_and_kill(folder, "local", "held", hold=4)
    assert go_on(spark, folder, "local") == undisturbed
    assert starts(folder) == [0, 0]


@pytest.mark.soak
def test_on_another_number_of_executors(undisturbed, tmp_path):
    """One executor until the driver is killed, two from then on."""
    folder = tmp_path / "run"
    run_and_kill(folder, "shuffle", "held", hold=16, master="local-cluster[1,1,1024]")
    assert run(folder, "shuffle", master="local-cluster[2,1,1024]") == undisturbed
    assert starts(folder) == [0, 12]
