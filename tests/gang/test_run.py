"""``sparkdl.gang.run``: any function as the ranks of a process group, and what becomes of mistakes."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import importable
import pytest
import torch
import torch.distributed as dist
from mistakes import message_of
from pyspark import cloudpickle

import sparkdl
from sparkdl import ParameterError, StalledError, StateLostError, TrainingError
from sparkdl.gang import driver, process_group

pytestmark = [pytest.mark.gang, pytest.mark.spark]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(importable)
RANKS = 2


def total(value: float, offset: float = 0.0) -> tuple[int, float, int]:
    tensor = torch.full((3,), value * (dist.get_rank() + 1) + offset)
    dist.all_reduce(tensor)
    return dist.get_rank(), float(tensor[0]), os.getpid()


@pytest.fixture(autouse=True)
def nothing_runs_on(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every gang has ended, its task slots are free, and its store's file is gone."""
    folders: list[Path] = []

    form = driver.form_group

    def formed(call: Any, seconds: float) -> Any:
        def told(command: Any) -> list[Any]:
            found = call(command)
            folders.extend(Path(folder) for folder in found[:1] if command is offered)
            return found

        return form(told, seconds)

    offered = process_group.offer_folder
    monkeypatch.setattr(driver, "form_group", formed)
    yield folders
    tracker = spark.sparkContext.statusTracker()

    def left() -> list[object]:
        return [*tracker.getActiveStageIds(), *filter(Path.exists, folders)]

    until = time.monotonic() + 10
    while left() and time.monotonic() < until:
        time.sleep(0.05)
    assert left() == []


def test_every_rank_returns_its_result_in_order(spark):
    found = sparkdl.gang.run(total, 2.0, offset=1.0, ranks=RANKS)
    assert [(rank, value) for rank, value, _ in found] == [(0, 8.0), (1, 8.0)]
    assert len({pid for _, _, pid in found} | {os.getpid()}) == RANKS + 1


def test_functions_of_any_kind(spark):
    outer = 5

    def nested(x: int) -> int:
        return x + outer + dist.get_rank()

    def makes() -> Callable[[], int]:
        rank = dist.get_rank()
        return lambda: rank

    assert sparkdl.gang.run(lambda: dist.get_rank() * 10) == [0, 10]  # all task slots
    assert [made() for made in sparkdl.gang.run(makes, ranks=RANKS)] == [0, 1]  # no import finds it
    assert sparkdl.gang.run(nested, 1, ranks=RANKS) == [6, 7]
    assert sparkdl.gang.run(partial(nested, 2), ranks=1) == [7]
    assert sparkdl.gang.run(importable.rank_and_size, ranks=RANKS) == [(0, 2), (1, 2)]
    assert sparkdl.gang.run(dist.get_world_size, ranks=RANKS, spark=spark) == [2, 2]


def test_a_communicator_works_in_a_gang(spark):
    def ring() -> list[float]:
        world = sparkdl.gang.Communicator()
        own = torch.arange(3.0) + world.rank
        return world.all_reduce(own, algorithm="ring").tolist()

    assert sparkdl.gang.run(ring, ranks=RANKS) == [[1.0, 3.0, 5.0]] * RANKS


def test_where_ranks_see_no_common_file_rank_0_serves_the_store(
    spark, monkeypatch, nothing_runs_on
):
    def no(folder: str, member: Any) -> bool:
        return False

    def opened(store: Any, seconds: float, backend: str, member: Any) -> None:
        assert not isinstance(store, str)
        join(store, seconds, backend, member)

    join = process_group.join
    monkeypatch.setattr(process_group, "sees", no)
    monkeypatch.setattr(process_group, "join", opened)
    assert [value for _, value, _ in sparkdl.gang.run(total, 1.0, ranks=RANKS)] == [3.0, 3.0]
    for folder in nothing_runs_on:
        shutil.rmtree(folder)


def test_what_ranks_print_comes_here_on_demand(spark, capsys):
    def speak() -> None:
        print("line of", dist.get_rank())
        print("part", end="")
        sys.stderr.write("warned\n")

    sparkdl.gang.run(speak, ranks=RANKS)
    assert "line of" not in capsys.readouterr().out
    sparkdl.gang.run(speak, ranks=RANKS, output=True)
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [
        f"[rank {r}] {t}" for r in range(RANKS) for t in (f"line of {r}", "partwarned")
    ]


def mistake(seconds: float) -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one's own")
    if seconds:
        time.sleep(seconds)
    else:
        dist.barrier()


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["in a collective", "asleep"])
def test_the_first_mistake_is_told_and_the_others_end(spark, seconds):
    began = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        sparkdl.gang.run(mistake, seconds, ranks=RANKS)
    assert time.monotonic() - began < 20
    message = str(caught.value)
    host = re.escape(socket.gethostname())
    assert re.match(rf"mistake: rank 1 on {host} failed\. ValueError: rank one's own\n", message)
    assert 'raise ValueError("rank one\'s own")' in message
    assert "sparkdl/gang" not in message  # the user's own frames only
    assert sparkdl.gang.run(dist.get_rank, ranks=RANKS) == [0, 1]  # the session is as good as new


def stuck(dying: int) -> None:
    if dist.get_rank() == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_dies_is_named(spark, rank):
    """What it leaves of the group's store goes with the next gang."""
    told = rf"^stuck: rank {rank} on \S+ went away \(the process died"
    with pytest.raises(StateLostError, match=told):
        sparkdl.gang.run(stuck, rank, ranks=RANKS)
    assert sparkdl.gang.run(dist.get_rank, ranks=RANKS) == [0, 1]


@pytest.mark.soak
def test_a_rank_that_takes_too_long_is_named(spark):
    def sleepy() -> None:
        if dist.get_rank() == 0:
            time.sleep(60)

    sparkdl.gang.run(dist.get_rank, ranks=RANKS)  # what starts Python takes its time of the bound
    began = time.monotonic()
    with pytest.raises(StalledError, match=r"^sleepy: waited 10 s for rank 0 on \S+\. Where it"):
        sparkdl.gang.run(sleepy, ranks=RANKS, timeout=10.0)
    assert time.monotonic() - began < 45


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "fn is None: give a function."),
    (total, {"ranks": 0}, "ranks = 0: give a whole number of at least 1."),
    (total, {"ranks": True}, "ranks = True: give a whole number of at least 1."),
    (total, {"device": "tpu"}, 'device = "tpu": use one of auto, cpu, cuda.'),
    (total, {"timeout": 0}, "timeout = 0: give a number of seconds, or None."),
    (total, {"timeout": "60"}, "timeout = '60': give a number of seconds, or None."),
    (total, {"timeout": math.inf}, "timeout = inf: give a number of seconds, or None."),
    (
        total,
        {"ranks": 3},
        "a gang of 3 ranks needs 3 task slots at once, and this session has 2: ask for at most 2 "
        "ranks, or for more executors or cores.",
    ),
]


@pytest.mark.parametrize(("fn", "options", "message"), BAD)
def test_mistakes_start_no_stage(spark, num_stages, fn, options, message):
    assert message_of(ParameterError, sparkdl.gang.run, fn, **options) == message
    assert num_stages() == 0


@pytest.fixture
def num_stages(spark: Any) -> Any:
    """Stages that were submitted since."""
    scheduler = spark.sparkContext._jsc.sc().dagScheduler()
    before = scheduler.numTotalJobs()
    return lambda: scheduler.numTotalJobs() - before
