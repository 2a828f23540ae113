"""Ranks that end leave nothing of their store or of DistributedDataParallel behind. No Spark."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from sparkdl.gang import process_group

pytestmark = pytest.mark.gang
RANKS, GANGS = 4, 20


def lives(rank: int, pipe: Any, gangs: int) -> None:
    """Be a rank of one gang after another. ``pipe``: to the driver."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    for _ in range(gangs):
        with contextlib.ExitStack() as at_end:
            member: Any = SimpleNamespace(
                rank=rank,
                size=RANKS,
                address="127.0.0.1",
                device=torch.device("cpu"),
                at_end=at_end,
            )
            pipe.send(process_group.offer_folder(member))
            folder = pipe.recv()
            pipe.send(process_group.sees(folder, member))
            if pipe.recv() == "end":
                continue
            process_group.join(f"{folder}/store", 60.0, "gloo", member)
            dist.barrier()
            pipe.send(os.path.exists(f"{folder}/store"))
            pipe.recv()


@pytest.fixture
def gang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Starts ranks, each with its pipe; their folders are made in ``tmp_path``."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    start = multiprocessing.get_context("spawn")
    running: list[Any] = []

    def begin(gangs: int) -> list[Any]:
        for rank in range(RANKS):
            ours, theirs = start.Pipe()
            process = start.Process(target=lives, args=(rank, theirs, gangs), daemon=True)
            process.start()
            theirs.close()
            running.append((process, ours))
        return running

    yield begin
    for process, pipe in running:
        process.kill()
        process.join()
        pipe.close()


def ask(gang: list[Any], command: Any) -> list[Any]:
    for _, pipe in gang:
        pipe.send(command)
    return answers(gang)


def answers(gang: list[Any]) -> list[Any]:
    assert all(pipe.poll(60) for _, pipe in gang), "a rank does not answer"
    return [pipe.recv() for _, pipe in gang]


@pytest.mark.soak
def test_nothing_is_left_however_ranks_end_beside_each_other(gang, tmp_path):
    ranks = gang(GANGS)
    for _ in range(GANGS):
        folder, *others = answers(ranks)
        assert others == [""] * (RANKS - 1)
        assert Path(folder).parent == tmp_path
        assert ask(ranks, folder) == [True] * RANKS
        assert ask(ranks, "join") == [True] * RANKS
        for _, pipe in ranks:
            pipe.send("end")
    for process, _ in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("last", [0, RANKS - 1])
@pytest.mark.soak
def test_the_last_to_let_go_removes_it_one_that_was_killed_holds_nothing(gang, last):
    ranks = gang(1)
    folder = answers(ranks)[0]
    assert ask(ranks, folder) == [True] * RANKS
    killed, *ended = [rank for n, rank in enumerate(ranks) if n != last]
    killed[0].kill()
    killed[0].join()
    for process, pipe in ended:
        pipe.send("end")
        process.join(60)
        assert os.path.isdir(folder)
    process, pipe = ranks[last]
    pipe.send("end")
    process.join(60)
    assert not os.path.exists(folder)


def test_a_folder_that_is_not_there_is_not_seen(tmp_path):
    with contextlib.ExitStack() as at_end:
        member: Any = SimpleNamespace(at_end=at_end)
        assert not process_group.sees(str(tmp_path / "none"), member)
        assert not process_group.sees("", member)


def test_a_reducer_goes_before_the_process_group(tmp_path):
    """Also while something, a traceback say, holds the module."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    module = DistributedDataParallel(nn.Linear(3, 2))
    reducer = weakref.ref(module.reducer)
    assert reducer() is not None
    process_group.leave()
    assert reducer() is None
    assert not dist.is_initialized()


def pollers() -> int:
    """The threads of Gloo's groups in this process."""
    names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    return sum(name == "gloo_tcp_loop" for name in names)


@pytest.mark.linux
def test_tensors_on_a_mesh_keep_no_group(tmp_path):
    """torch caches how to compute with them, by their mesh."""
    before = pollers()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard-of-this-test",))
    module = fully_shard(nn.Linear(3, 2), mesh=mesh)
    module(torch.ones(4, 3)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    cut = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    product = (cut @ cut).redistribute(mesh, [Replicate()])
    assert pollers() > before
    del module, mesh, cut, product
    process_group.leave()
    gc.collect()
    assert pollers() == before


@pytest.mark.parametrize(
    ("backend", "failed", "aborted"),
    [("gloo", True, 0), ("cpu:gloo,cuda:nccl", True, 1), ("cpu:gloo,cuda:nccl", False, 0)],
)
def test_nccl_is_not_waited_for_after_an_error(tmp_path, monkeypatch, backend, failed, aborted):
    """It waits for ranks that are lost. None is here: the group says that it is of NCCL."""
    calls = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append(1))
    process_group.leave(failed=failed)
    assert len(calls) == aborted
    assert not dist.is_initialized()
    process_group.leave(failed=failed)  # the user's function may have done it
