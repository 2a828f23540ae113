"""The Spark job of a group's turn."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark import RDD

from sparkdl.consistency.turns import Turn
from sparkdl.engines.shuffle.group_tasks import Headers, KeepGradients, TakeTurn, TurnMessage
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.replica_tasks import ForwardBackward
from sparkdl.engines.shuffle.state_tasks import Recount
from sparkdl.replica.iteration import Iteration, ReplicaReport
from sparkdl.spark.frames import RunningJob, map_frames, shuffle_frames, some_partitions, zip_frames


@dataclass(frozen=True)
class RunningTurn:
    """A turn that is under way, or whose gradient waits."""

    turn: Turn
    asked: Iteration
    submission: int
    job: RunningJob
    shuffled: RDD | None
    tries: int = 0  # submissions before this one
    headers: Headers = ()
    reports: tuple[ReplicaReport, ...] = ()


def turn_rdd(placement: Placement, message: TurnMessage, group: range, alone: bool) -> RDD:
    """Return the RDD of a turn, whose frames hold the headers of its gradients."""
    task = TakeTurn(message) if alone else ForwardBackward(message)
    rdd = placement.tasks_with_weights(task, placement.samples, message.read_states, message.copies)
    some = some_partitions(rdd, group)
    if alone:
        return some
    sent = shuffle_frames(some, placement.slices, few_bytes=placement.few_bytes)
    owners = map_frames(placement.slice_rdd, Recount(len(group)))
    return map_frames(zip_frames(sent, owners), KeepGradients(message))
