"""Executors come and go by Spark's own means while a model trains; the bits are always the same."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import train_on_changing_cluster as script
from harness.cluster import PATIENT, Standalone
from harness.faulty import frame, outcome, trainer
from harness.processes import wait_until
from launch import launch

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(600)]
DECOMMISSION = {
    "spark.decommission.enabled": "true",
    "spark.storage.decommission.enabled": "true",
    "spark.storage.decommission.rddBlocks.enabled": "true",
    "spark.storage.decommission.shuffleBlocks.enabled": "true",
    "spark.storage.decommission.replicationReattemptInterval": "1s",
}
DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.initialExecutors": "2",
}
IDLE = {
    "spark.dynamicAllocation.executorIdleTimeout": "8s",
    "spark.dynamicAllocation.cachedExecutorIdleTimeout": "8s",
    "spark.dynamicAllocation.shuffleTracking.timeout": "8s",
}
Wait = Callable[[int], None]
REPLICAS = 3


@pytest.fixture(scope="module")
def undisturbed(spark) -> dict:
    run = trainer(REPLICAS, iterations=script.ITERATIONS, engine="local")
    return outcome(run.fit(frame(spark, REPLICAS)))


def train(
    folder: Path,
    way: str,
    workers: int,
    change: Callable[[Standalone, Wait], None],
    pauses: dict[int, float],
    of_workers: dict[str, str] | None = None,
    slow: int = 0,
    cores: int = 1,
    **settings: str,
) -> tuple[dict, list[int]]:
    """The outcome, and the executors after each iteration. ``change`` is called when the driver is
    started, with a function that waits for the end of an iteration. In iteration ``slow`` tasks wait
    for one that is slow; ``cores``: of a worker, whose executors have one each."""
    told = folder / "told"

    def lines() -> list[str]:
        return told.read_text().splitlines() if told.exists() else []

    with (
        Standalone(workers, cores, folder / "cluster", settings=of_workers or {}) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(
            launch,
            Path(script.__file__),
            folder,
            master=cluster.url,
            told=str(told),
            replicas=REPLICAS,
            pauses=pauses,
            slow=slow,
            notes=str(folder / "notes"),
            settings={
                **PATIENT,
                "spark.executor.cores": "1",
                "spark.sparkdl.slab.dir": "slabs" if way == "bytes" else str(folder / "slabs"),
                **settings,
            },
        )

        def wait(iteration: int) -> None:
            wait_until(
                lambda: len(lines()) >= iteration or running.done(), 300, f"iteration {iteration}"
            )
            if running.done():
                running.result()

        change(cluster, wait)
        result = running.result()
    return result, [int(line.split()[1]) for line in lines()]


WAYS = pytest.mark.parametrize("way", ["references", "bytes"])


@WAYS
def test_a_worker_is_decommissioned(tmp_path, undisturbed, way):
    """Spark moves its blocks to the others, and it is gone."""

    def change(cluster: Standalone, wait: Wait) -> None:
        wait(8)
        cluster.running[1].decommission()
        wait_until(lambda: not cluster.running[1].executors(), 60, "the executor ends")

    result, executors = train(
        tmp_path,
        way,
        3,
        change,
        {12: 15.0},
        DECOMMISSION,
        **DECOMMISSION,
        **{"spark.cores.max": "3"},
    )
    assert result == undisturbed
    assert (executors[0], executors[-1]) == (3, 2)


@WAYS
def test_one_executor_is_lost_for_good_and_one_is_gained(tmp_path, undisturbed, way):
    """With dynamic allocation, which asks for another executor where tasks have waited for a second."""

    def change(cluster: Standalone, wait: Wait) -> None:
        wait(8)
        cluster.running[0].kill()
        wait(20)
        cluster.add_worker()

    result, executors = train(tmp_path, way, 2, change, {25: 15.0}, slow=25, **DYNAMIC)
    assert result == undisturbed
    assert executors[0] == 2
    assert 1 in executors
    assert executors[-1] == 2


@WAYS
def test_dynamic_allocation_takes_idle_executors_away(tmp_path, undisturbed, way):
    """The driver has something else to do for a while, and Spark gives idle executors back."""
    pauses = {8: 20.0}
    result, executors = train(
        tmp_path, way, 2, lambda cluster, wait: None, pauses, **DYNAMIC, **IDLE
    )
    assert result == undisturbed
    assert executors[0] == 2
    assert 1 in executors


def test_idle_executors_leave_their_blocks_to_the_shuffle_service(tmp_path, undisturbed):
    """Two executors of a worker, whose service has their shuffle files and what they persisted on
    disk: the snapshot."""
    with socket.create_server(("", 0)) as free:
        port = str(free.getsockname()[1])
    service = {
        "spark.shuffle.service.enabled": "true",
        "spark.shuffle.service.port": port,
        "spark.shuffle.service.fetch.rdd.enabled": "true",
    }
    result, executors = train(
        tmp_path,
        "bytes",
        1,
        lambda cluster, wait: None,
        {8: 20.0},
        service,
        cores=2,
        **DYNAMIC,
        **IDLE,
        **service,
        **{"spark.sparkdl.snapshot.seconds": "0"},
    )
    assert result == undisturbed
    assert executors[0] == 2
    assert 1 in executors


@WAYS
def test_tasks_that_wait_for_no_place(tmp_path, undisturbed, way):
    """Without locality waits Spark would run tasks wherever a slot is free: a fit has it wait."""
    result, executors = train(
        tmp_path,
        way,
        2,
        lambda cluster, wait: None,
        {},
        **{"spark.locality.wait": "0s", "spark.cores.max": "2"},
    )
    assert result == undisturbed
    assert set(executors) == {2}
