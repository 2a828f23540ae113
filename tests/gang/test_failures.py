"""What ranks say of what went wrong: of a broken group, wherever it shows, and in snapshots."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pyspark import cloudpickle
from real_ranks import WORLD, impatient
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleGPipe

from sparkdl.collectives.communicator import Communicator
from sparkdl.engines.gang.engine import GangEngine, InFlight
from sparkdl.engines.gang.snapshots import SnapshotFiles, Snapshots, unpack_kept
from sparkdl.errors import StateLostError, TrainingError
from sparkdl.gang.rank_task import Failure, describe_failure

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Waits(nn.Module):
    """For the sum over ranks of which one does not come."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.communicator.all_reduce(x)


class Mistaken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("an operation of the user's")


def failure_of(stage: nn.Module, alone: Any) -> Failure:
    """Of a pass through a pipeline of one stage."""
    x = torch.zeros(2, 3)
    made = PipelineStage(
        stage, 0, 1, torch.device("cpu"), input_args=(x,), output_args=(x,), group=alone
    )
    try:
        ScheduleGPipe(made, 1).step(x)
    except Exception as error:
        return describe_failure(error)
    raise AssertionError("the stage did not fail")


def in_stages(communicator: Communicator) -> list[Failure]:
    """Of the first rank, alone; the other one does nothing."""
    communicator = impatient()
    if communicator.rank != 0:
        return []
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return [failure_of(Waits(communicator), alone), failure_of(Mistaken(), alone)]


def test_a_group_that_breaks_inside_a_stage_is_told_from_a_mistake(ranks: Any) -> None:
    (broken, mistake), _ = ranks.run(2, in_stages)
    assert broken.by_group
    assert "gloo" in broken.text
    assert not mistake.by_group
    assert (mistake.kind, mistake.text) == ("ValueError", "an operation of the user's")
    assert "failed to run forward" in mistake.trace


def snapshot(communicator: Any, folder: str) -> str | None:
    """Of what ranks keep of their gradients; rank 1 has nothing that could be packed."""
    rank = communicator.rank
    kept = torch.full((2,), float(rank), device="meta" if rank == 1 else "cpu")
    held: Any = SimpleNamespace(as_slices=lambda states: {}, states={}, best={}, slices=[])
    way: Any = SimpleNamespace(kept={0: {"rest": kept}}, settle=lambda: None)
    snapshots = Snapshots(SnapshotFiles(Path(folder)), rank, 0, WORLD)
    snapshots.begin(held, way)
    problem = snapshots.save("snapshot", [0])
    dist.barrier()
    return problem


def test_a_rank_that_cannot_pack_what_it_keeps_says_so(ranks: Any, tmp_path: Path) -> None:
    """The others go on beside it."""
    problems = ranks.run(WORLD, snapshot, str(tmp_path))
    assert [problem is None for problem in problems] == [rank != 1 for rank in range(WORLD)]
    assert problems[1].startswith("NotImplementedError")
    last = unpack_kept(SnapshotFiles(tmp_path).read("snapshot", WORLD - 1))
    assert last[0]["rest"].tolist() == [WORLD - 1.0] * 2


def test_a_snapshot_that_ends_the_ranks_costs_the_state() -> None:
    """So that the run goes on from its last point, instead of asking ranks that are no more."""

    def call(command: Any, doing: str) -> list[Any]:
        raise TrainingError("taking a snapshot: rank 1 on node failed. MemoryError: ")

    engine: Any = GangEngine.__new__(GangEngine)
    engine._node_ids, engine._gang = ["node", "node"], SimpleNamespace(call=call)
    engine._asked = InFlight(engine._gang, engine._step)
    with pytest.raises(StateLostError, match="rank 1 on node failed"):
        engine.take_snapshot()
