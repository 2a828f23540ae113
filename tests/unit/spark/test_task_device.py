"""Which GPU a task takes that trains or predicts. None is here: torch and Spark say what they would."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pyspark import TaskContext

from sparkdl.spark.device import task_device


@pytest.fixture
def current():
    """What torch is told to take from here on."""
    return []


@pytest.fixture
def node(monkeypatch, current):
    """A node with so many GPUs, and a task there: its partition, and the GPU that Spark assigned."""

    def of(gpus, partition=None, assigned=None, before=None):
        context = None
        if partition is not None:
            resources = {} if assigned is None else {"gpu": SimpleNamespace(addresses=[assigned])}
            context = SimpleNamespace(resources=lambda: resources, partitionId=lambda: partition)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(TaskContext, "get", lambda: context)
        return task_device(before)

    return of


def test_the_gpu_that_spark_assigned(node, current):
    assert node(4, partition=0, assigned="3") == torch.device("cuda", 3)
    assert current == [torch.device("cuda", 3)]


def test_those_of_the_node_in_turn(node):
    assert [node(2, partition=p).index for p in range(4)] == [0, 1, 0, 1]


def test_the_cpu_where_there_is_none(node, current):
    assert node(0, partition=5) == torch.device("cpu")
    assert not current


def test_outside_a_task(node):
    assert node(2) == torch.device("cuda", 0)


def test_where_something_is_kept_already(node):
    kept = torch.device("cuda", 1)
    assert node(4, partition=3, before=kept) == kept
    assert node(4, partition=3, assigned="2", before=kept) == torch.device("cuda", 2)
    assert node(0, partition=3, before=torch.device("cpu")) == torch.device("cpu")
