"""A check of a session's GPUs before a fit reads its data.

Each replica runs in its own process, and each process should have its own GPU, because every
process keeps a copy of the model in GPU memory. Spark takes care of that if it knows the number of
GPUs. In ``local[...]`` it cannot, so there are as many replicas as GPUs.
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
"""The number of GPUs found on each executor, by application and its executors."""


def within_gpus(context: SparkContext, replicas: int, chosen: bool, engine: str) -> int:
    """Return the number of replicas, after checking that they do not share GPUs by accident.

    ``chosen``: the user has set it. The engine "local" has as many as others, and uses no GPU.
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
            "a task uses one GPU, and the others that Spark assigns to it stay idle: set %s=1.",
            AMOUNT,
        )
    return replicas


def _capped(replicas: int, gpus: int) -> int:
    if 0 < gpus < replicas:
        logger.info(
            "%d replicas, one for each GPU, and not one for each of %d task slots: set replicas= "
            "to override this.",
            gpus,
            replicas,
        )
        return gpus
    return replicas


def sharing(there: Sequence[Executor], counts: Sequence[int], replicas: int) -> str | None:
    """Return a message if a host may run more tasks at a time than it has GPUs, else None."""
    slots: dict[str, int] = {}
    gpus: dict[str, int] = {}
    for executor, count in zip(there, counts, strict=False):
        slots[executor.host] = slots.get(executor.host, 0) + executor.slots
        gpus[executor.host] = max(count, gpus.get(executor.host, 0))
    for host, count in gpus.items():
        tasks = min(slots[host], replicas)
        if 0 < count < tasks:
            return (
                f"up to {tasks} replicas would share {count} GPU{'s' * (count > 1)} on {host}, "
                "each with a model of its own in its memory. Let Spark assign them: "
                "spark.executor.resource.gpu.amount and .discoveryScript say how many an executor "
                f"has, {AMOUNT}=1 gives each task one. Pass replicas= to have this many anyway; "
                "spark.executorEnv.CUDA_VISIBLE_DEVICES= (empty) leaves GPUs alone."
            )
    return None


@dataclass(frozen=True)
class CountGpus:
    """Task: yield the number of GPUs that a task sees here, pickled.

    A :class:`SessionError` is yielded too, for the driver to raise, because Spark would retry the
    task.
    """

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
    """Return the number of GPUs that a task sees on each of these executors."""
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
