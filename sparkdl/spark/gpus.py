"""The GPUs of a session, looked at before a fit reads its data.

Each replica computes in a process of its own, and each process wants a GPU for itself: its memory
holds the model once for each of them. Spark sees to that where it is told how many there are. In
``local[...]`` it cannot be, so that there are as many replicas as GPUs.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from pyspark import SparkContext, TaskContext

from sparkdl.errors import SessionError
from sparkdl.session import conf_of
from sparkdl.spark.device import gpus_of
from sparkdl.spark.executors import Executor, executor_awaited, executors, task_per_executor
from sparkdl.spark.frames import collect_and_forget, is_local, map_frames, stage_name
from sparkdl.spark.worker import finish_task

AMOUNT = "spark.task.resource.gpu.amount"
logger = logging.getLogger("sparkdl")
_looked: dict[tuple[str, frozenset[str]], list[int]] = {}
"""What was found, by application and its executors."""


def within_gpus(context: SparkContext, replicas: int, chosen: bool, engine: str) -> int:
    """How many replicas there shall be. ``chosen``: the user says how many. ``engine``: "local" uses no
    GPU, and has as many replicas as others in the same session.

    Raises :class:`SessionError` where Spark assigns GPUs that torch does not see, and where tasks of a
    cluster would share GPUs though nobody has said so.
    """
    assigned = conf_of(context).contains(AMOUNT)
    if is_local(context):
        return replicas if chosen else _capped(replicas, torch.cuda.device_count())
    if engine == "local" or (
        not assigned and torch.version.cuda is None and torch.version.hip is None
    ):
        return replicas
    there = executors(context)
    counts = _look(context, there)
    problem = None if assigned else sharing(there, counts, replicas)
    if problem and not chosen:
        raise SessionError(problem)
    if problem:
        logger.warning("%s", problem)
    if assigned and float(conf_of(context).get(AMOUNT, "1")) > 1:
        logger.warning(
            "a task computes on one GPU, and the others that Spark assigns to it are idle: set %s=1.",
            AMOUNT,
        )
    return replicas


def _capped(replicas: int, gpus: int) -> int:
    if 0 < gpus < replicas:
        logger.info(
            "%d replicas, one for each GPU, and not one for each of %d task slots: replicas= says "
            "otherwise.",
            gpus,
            replicas,
        )
        return gpus
    return replicas


def sharing(there: Sequence[Executor], counts: Sequence[int], replicas: int) -> str | None:
    """What to say where more tasks of a host may run at a time than it has GPUs, if any."""
    slots: dict[str, int] = {}
    gpus: dict[str, int] = {}
    for executor, count in zip(there, counts, strict=False):
        slots[executor.host] = slots.get(executor.host, 0) + executor.slots
        gpus[executor.host] = max(count, gpus.get(executor.host, 0))
    for host, count in gpus.items():
        tasks = min(slots[host], replicas)
        if 0 < count < tasks:
            return (
                f"up to {tasks} replicas would share {count} GPU{'s' * (count > 1)} on {host}, each "
                "with a model of its own in its memory. Let Spark assign them: "
                "spark.executor.resource.gpu.amount and .discoveryScript say how many an executor has, "
                f"{AMOUNT}=1 gives each task one. replicas= says how many shall be there all the same; "
                "spark.executorEnv.CUDA_VISIBLE_DEVICES= (empty) leaves GPUs alone."
            )
    return None


@dataclass(frozen=True)
class CountGpus:
    """Body of a task: how many GPUs a task sees here; or a pickled :class:`SessionError`, for the
    driver to raise: Spark would retry the task."""

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        for _ in frames:
            pass
        context = TaskContext.get()
        gpu = None if context is None else context.resources().get("gpu")
        try:
            count = torch.cuda.device_count() if gpu is None else len(gpus_of(gpu.addresses))
            yield pickle.dumps(count)
        except SessionError as error:
            yield pickle.dumps(error)
        finish_task()


def _look(context: SparkContext, there: Sequence[Executor]) -> list[int]:
    """The GPUs that a task sees on each of these executors."""
    key = context.applicationId, frozenset(executor.name for executor in there)
    if there and key in _looked:
        return _looked[key]
    with stage_name(context, "look for GPUs"), executor_awaited(context):
        places = task_per_executor(context, [*there] or [None])
        found = [
            pickle.loads(frame) for frame in collect_and_forget(map_frames(places, CountGpus()))
        ]
    for one in found:
        if isinstance(one, SessionError):
            raise one
    _looked[key] = found
    return found
