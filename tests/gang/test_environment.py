"""What a rank finds in its environment: all that torchrun would say."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest
import torch
import torch.distributed as dist
from pyspark import cloudpickle

import sparkdl
from sparkdl.gang.process_group import Where, announce, interface_of, tell_of_other_gpu, variables
from sparkdl.gang.rank_task import RankContext

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])
RANKS = 2
OF_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS"),
}


def of(told: list[dict[str, str]], *names: str) -> list[tuple[int, ...]]:
    return [tuple(int(said[name]) for name in names) for said in told]


def test_ranks_of_a_node_are_numbered():
    told = variables([Where(node) for node in "abab"], "gang")
    assert of(told, "RANK", "WORLD_SIZE") == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert of(told, "LOCAL_RANK", "LOCAL_WORLD_SIZE") == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert of(told, "GROUP_RANK", "GROUP_WORLD_SIZE") == [(0, 2), (1, 2), (0, 2), (1, 2)]
    uneven = variables([Where(node) for node in "aab"], "gang")
    assert of(uneven, "LOCAL_RANK", "LOCAL_WORLD_SIZE") == [(0, 2), (1, 2), (0, 1)]


def test_the_local_rank_is_the_number_of_the_gpu():
    """Where libraries take the one of that number, whatever Spark assigned to whom."""
    gpus = [2, 0, 1, 0, 1]
    told = variables([Where("aaabb"[r], gpu, str(gpu)) for r, gpu in enumerate(gpus)], "gang")
    assert [int(said["LOCAL_RANK"]) for said in told] == gpus


@pytest.mark.parametrize(("gpu", "told"), [(0, []), (2, ["rank 0 computes on GPU 2 of its node"])])
def test_a_gpu_of_another_number_is_told(caplog, gpu, told):
    device = torch.device("cuda", gpu)
    with contextlib.ExitStack() as at_end:
        member = RankContext(0, 1, "a", device, [], at_end)
        announce(variables([Where("a", gpu, "slot")], "gang"), member)
        tell_of_other_gpu(member)
    assert [record.getMessage()[:36] for record in caplog.records] == told


def asked() -> tuple[int, dict[str, str]]:
    return os.getpid(), dict(os.environ)


@pytest.fixture
def environments(spark):
    """Of the processes of Spark's workers, before and after a gang has used them."""

    def look():
        # Spark gives tasks to its idle workers by turns: so many go through all of them
        pairs = spark.sparkContext.parallelize(range(32), 32).map(lambda _: asked())
        return dict(pairs.collect())

    return look


@pytest.mark.spark
def test_a_rank_is_told_what_torchrun_says(spark, environments):
    before = environments()
    found = sparkdl.gang.run(asked, ranks=RANKS)
    after = environments()
    for rank, (_, said) in enumerate(found):
        assert said.keys() >= OF_TORCHRUN
        assert said["RANK"] == said["LOCAL_RANK"] == said["ROLE_RANK"] == str(rank)
        assert said["WORLD_SIZE"] == said["LOCAL_WORLD_SIZE"] == said["ROLE_WORLD_SIZE"] == "2"
        assert (said["GROUP_RANK"], said["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert said["MASTER_ADDR"] == "127.0.0.1"
        assert said["OMP_NUM_THREADS"] == "1"
    assert len({said["MASTER_PORT"] for _, said in found}) == 1
    used = dict(found).keys() & before.keys() & after.keys()
    assert used  # a worker serves one task after another
    for process in used:
        assert after[process] == before[process]


def joined_again() -> float:
    """As a library does that makes the process group by itself."""
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    value = torch.tensor(1.0 + int(os.environ["RANK"]))
    dist.all_reduce(value)
    return float(value)


@pytest.mark.spark
def test_who_makes_a_group_of_that_environment_finds_the_others(spark):
    assert sparkdl.gang.run(joined_again, ranks=RANKS, timeout=60.0) == [3.0, 3.0]


def interfaces() -> tuple[str | None, ...]:
    return tuple(os.environ.get(f"{kind}_SOCKET_IFNAME") for kind in ("GLOO", "NCCL"))


@pytest.mark.spark
def test_a_network_interface_that_the_user_names_stays(spark):
    assert sparkdl.gang.run(interfaces, ranks=1) == [("lo", "lo")]
    workers = spark.sparkContext.environment
    workers["NCCL_SOCKET_IFNAME"] = "eth9"
    try:
        assert sparkdl.gang.run(interfaces, ranks=1) == [("lo", "eth9")]
    finally:
        del workers["NCCL_SOCKET_IFNAME"]


def test_an_address_of_another_node_has_no_interface():
    with pytest.raises(ValueError, match=r"no network interface of this node has the address"):
        interface_of("192.0.2.1")
