"""How many replicas there are where GPUs are fewer than task slots. Without a GPU."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from pyspark import SparkContext, TaskContext

import sparkdl
from sparkdl.errors import SessionError
from sparkdl.gang.process_group import Where, check_unshared
from sparkdl.spark.device import count_gpus, sharing, within_gpus
from sparkdl.spark.executors import Executor


def executors(*hosts: str) -> list[Executor]:
    return [Executor(host, str(number), 4) for number, host in enumerate(hosts)]


@pytest.mark.parametrize(
    ("hosts", "counts", "replicas", "told"),
    [
        ("ab", [4, 4], 8, None),
        ("ab", [0, 0], 8, None),
        ("ab", [1, 1], 1, None),
        ("ab", [4, 1], 8, "up to 4 replicas would share 1 GPU on b, "),
        # Both executors of a host see all of its GPUs
        ("aa", [4, 4], 8, "up to 8 replicas would share 4 GPUs on a, "),
        ("aa", [4, 4], 4, None),
    ],
)
def test_tasks_that_would_share_a_gpu(hosts, counts, replicas, told):
    found = sharing(executors(*hosts), counts, replicas)
    assert (found is None) == (told is None)
    assert found is None or (found.startswith(told) and "spark.task.resource.gpu.amount=1" in found)


@pytest.fixture
def local(monkeypatch):
    """A session of four task slots, on a machine with so many GPUs."""

    def of(gpus):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        conf = SimpleNamespace(contains=lambda key: False)
        return SimpleNamespace(master="local[4]", _conf=conf)

    return of


@pytest.mark.parametrize(
    ("gpus", "chosen", "expected"), [(0, False, 4), (2, False, 2), (8, False, 4), (2, True, 4)]
)
def test_in_local_mode_there_are_as_many_replicas_as_gpus(local, gpus, chosen, expected):
    assert within_gpus(local(gpus), 4, chosen, "shuffle") == expected


@pytest.mark.spark
@pytest.mark.gang
def test_and_as_many_ranks(spark: SparkContext, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert len(sparkdl.gang.run(str)) == 1
    assert len(sparkdl.gang.run(str, device="cpu")) == 2


def test_ranks_that_share_a_gpu():
    check_unshared([Where("a"), Where("a")])
    check_unshared([Where("a", 0, "3"), Where("a", 1, "4"), Where("b", 0, "3")])
    with pytest.raises(SessionError, match="3 ranks, one for each task slot, would share 2 GPUs"):
        check_unshared([Where("a", 0, "3"), Where("a", 0, "3"), Where("b", 0, "3")])


def test_a_gpu_that_an_executor_does_not_see_is_told_and_not_tried_again(monkeypatch):
    gpu = {"gpu": SimpleNamespace(addresses=["0"])}
    monkeypatch.setattr(TaskContext, "get", lambda: SimpleNamespace(resources=lambda: gpu))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (found,) = map(pickle.loads, count_gpus(0, [b""]))
    assert isinstance(found, SessionError)
