"""Which GPU an address of Spark's means, and why torch sees none. Without a GPU."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fork_server import run_fresh
from pyspark import TaskContext

from sparkdl.errors import SessionError
from sparkdl.spark import device
from sparkdl.spark.device import Sight, choose_gpus, gpus_here, task_device

A, B = "GPU-1f2e3d4c-0000-1111-2222-333344445555", "GPU-9a8b7c6d-0000-1111-2222-333344445555"
PART = "MIG-41b35014-ef42-5f4f-8d8d-ba1dbe7a3a7f"


@pytest.mark.parametrize(
    ("address", "visible", "expected"),
    [
        ("1", None, 1),
        (" 1", None, 1),
        ("6", "4,6", 1),  # as nvidia-smi counts, and torch counts what the variable leaves
        ("4", " 4 , 6", 0),
        ("1", "4,6", 1),  # of a container, where both count from 0
        ("1", f"{A},{B}", 1),
        (B, f"{A},{B}", 1),
        (B, "GPU-1f2e,GPU-9a8b", 1),  # CUDA takes names cut short
        ("GPU-9a8b", f"{A},{B}", 1),
        (B, None, 1),
        (B, "0,1", 1),
        (PART, None, PART),
        (PART, f"{PART},MIG-other", PART),
        ("MIG-GPU-1f2e3d4c/1/0", None, "MIG-GPU-1f2e3d4c/1/0"),
    ],
)
def test_an_address_is_a_device(address, visible, expected):
    names = [A.removeprefix("GPU-"), B.removeprefix("GPU-")]  # as torch says them
    assert choose_gpus([address], visible, 2, lambda: names) == [expected]


def test_each_of_several():
    assert choose_gpus(["7", "5"], "4,5,6,7", 4, list) == [3, 1]


@pytest.mark.parametrize(
    ("address", "visible"), [("2", None), ("7", "4,6"), ("GPU-00", None), ("GPU-00", f"{A},{B}")]
)
def test_an_address_that_is_none_of_them(address, visible):
    with pytest.raises(SessionError) as caught:
        choose_gpus([address], visible, 2, lambda: [A, B])
    told = "not set" if visible is None else f'"{visible}"'
    assert f'the GPU "{address}" to this task, but it is not one of the 2 that torch' in str(
        caught.value
    )
    assert f"(CUDA_VISIBLE_DEVICES is {told})" in str(caught.value)


@pytest.fixture
def torch_sees(monkeypatch):
    """A torch that sees so many GPUs; what it is told to take from here on."""
    current: list[torch.device] = []

    def of(count, started=False):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    for key in (device.VISIBLE, device.ORDER):
        monkeypatch.setenv(key, "")  # so that it is as it was, afterwards
        monkeypatch.delenv(key)
    return of


@pytest.fixture
def assigned(monkeypatch):
    """A task of a partition that Spark assigned these GPUs to."""

    def of(*addresses, partition=0):
        gpu = {"gpu": SimpleNamespace(addresses=list(addresses))} if addresses else {}
        context = SimpleNamespace(resources=lambda: gpu, partitionId=lambda: partition)
        monkeypatch.setattr(TaskContext, "get", lambda: context)
        return context

    return of


def test_the_gpu_that_spark_assigned_in_the_order_of_its_script(torch_sees, assigned):
    """By default CUDA puts the fastest first."""
    current = torch_sees(4)
    assigned("3")
    assert task_device() == torch.device("cuda", 3)
    assert current == [torch.device("cuda", 3)]
    assert os.environ[device.ORDER] == "PCI_BUS_ID"
    assert task_device(torch.device("cuda", 1)) == torch.device("cuda", 3)


def test_those_of_the_node_in_turn_where_spark_assigned_none(torch_sees, assigned):
    torch_sees(2)
    assert task_device() == torch.device("cuda", 0)  # outside a task
    found = []
    for partition in range(4):
        assigned(partition=partition)
        found.append(task_device().index)
    assert found == [0, 1, 0, 1]
    kept = torch.device("cuda", 0)
    assert task_device(kept) == kept  # where something is kept already


def test_the_cpu_where_there_is_no_gpu(torch_sees, assigned):
    current = torch_sees(0)
    assigned(partition=5)
    assert task_device() == task_device(torch.device("cpu")) == torch.device("cpu")
    assert not current


def test_a_process_is_given_its_part_of_a_gpu(torch_sees, assigned):
    current = torch_sees(1)
    assigned(PART)
    assert task_device() == torch.device("cuda", 0)
    assert os.environ[device.VISIBLE] == PART
    assert current == [torch.device("cuda", 0)]
    torch_sees(1, started=True)
    assert task_device() == torch.device("cuda", 0)
    assigned("MIG-other")
    with pytest.raises(SessionError, match=r"computes on MIG-41.*worker\.reuse=false"):
        task_device()
    assert os.environ[device.VISIBLE] == PART


def test_a_gpu_that_torch_does_not_see_is_no_reason_for_the_cpu(torch_sees, assigned):
    torch_sees(0)
    context = assigned("0")
    told = r"assigned the GPU '0' to this task, but torch sees none: torch .* built without CUDA\."
    with pytest.raises(SessionError, match=told):
        task_device()
    with pytest.raises(SessionError, match=told):
        gpus_here("auto", context)
    assert gpus_here("cpu", context) == ([], False)
    assigned()
    assert task_device() == torch.device("cpu")


@pytest.mark.parametrize("visible", ["", "-1", " -1,0"])
def test_gpus_that_are_hidden_are_left_alone(torch_sees, assigned, monkeypatch, visible):
    torch_sees(0)
    monkeypatch.setenv(device.VISIBLE, visible)
    context = assigned("0")
    assert task_device() == torch.device("cpu")
    assert gpus_here("auto", context) == ([], True)
    with pytest.raises(SessionError, match="torch sees no GPU on this node: "):
        gpus_here("cuda", context)


SEEN = Sight(True, None, False, None, True, "too old a driver")


@pytest.mark.parametrize(
    ("sight", "reason"),
    [
        ({"built": False}, "built without CUDA"),
        ({"forked": True}, "spark.python.daemon.module=sparkdl.daemon"),
        ({"address_space": 2 << 30}, "limited to 2 GiB, .* Unset spark.executor.pyspark.memory"),
        ({"visible": "7"}, "CUDA_VISIBLE_DEVICES=7 names no GPU of this node"),
        ({"driver": False}, "no GPU driver on the node"),
        ({}, "it says: too old a driver"),
    ],
)
def test_why_torch_sees_none(sight, reason):
    assert re.search(reason, replace(SEEN, **sight).reason)


LIMITED = """
import json, resource
resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))
from sparkdl.spark.device import Sight
print(json.dumps(vars(Sight.here())))
"""


def test_the_limits_of_this_process_are_seen():
    result = run_fresh(LIMITED, CUDA_VISIBLE_DEVICES="7")
    found = json.loads(result.stdout)
    assert found["address_space"] == 32 << 30
    assert found["visible"] == "7"
    assert not found["forked"]
