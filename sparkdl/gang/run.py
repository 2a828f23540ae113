"""A function that runs any function on the ranks of a ``torch.distributed`` group inside Spark."""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
from collections.abc import Callable
from typing import Any

import torch
from pyspark import SparkContext
from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparkdl.codec.safe import mapped
from sparkdl.errors import ParameterError, SessionError, kind_of
from sparkdl.gang.driver import Gang
from sparkdl.gang.environment import check_unshared
from sparkdl.gang.rank_task import RankContext
from sparkdl.gang.slots import task_slots
from sparkdl.plain import plain
from sparkdl.spark.frames import is_local
from sparkdl.usercode import accompanied

DEVICES = ("auto", "cpu", "cuda")


def run(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int | None = None,
    device: str = "auto",
    timeout: float | None = 1800.0,
    output: bool = False,
    spark: SparkSession | None = None,
    resource_profile: ResourceProfile | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank of a gang.

    All ranks run at once in a Spark barrier stage, each in its own Python process. The default
    process group of ``torch.distributed`` is initialized (Gloo, with NCCL on GPUs), so that
    ``dist.get_rank()`` and every collective work.

    Args:
        fn: Any function that cloudpickle can pickle, such as a lambda, a nested function, or one
            that executors can import.
        *args: Positional arguments of ``fn``.
        ranks: The number of ranks. None means as many as there are task slots, but in
            ``local[...]`` no more than there are GPUs, if there are any.
        device: "cuda", "cpu", or "auto" for a GPU if there is one. The current device of each rank
            is the GPU that Spark has assigned to it.
        timeout: The seconds that the ranks may take to connect, that they wait for each other, and
            that the function may take. None means no limit.
        output: Whether to print here, line by line, what ranks print.
        spark: The session. None means the active one.
        resource_profile: The resources of each rank's task, if they differ from those of other
            tasks: cores, GPUs, fractions of GPUs (``pyspark.resource``). It may contain task
            resources only, and needs a cluster.
        **kwargs: Keyword arguments of ``fn``.

    Returns:
        The results of the ranks, in rank order.

    Raises:
        sparkdl.TrainingError: If a rank fails, with the rank, host and traceback of the first one
            that fails. The other ranks then end within seconds.
        sparkdl.StateLostError: If a rank is lost, for example because its process was killed. The
            other ranks then end within seconds.
        sparkdl.StalledError: If the ranks take longer than ``timeout``.
        sparkdl.ParameterError: If a parameter is wrong, or there are too few task slots.
        sparkdl.SessionError: If this session cannot have such a gang.
    """
    if not callable(fn):
        raise ParameterError(f"fn is {kind_of(fn)}: give a function.")
    if device not in DEVICES:
        raise ParameterError(f'device = "{device}": use one of {", ".join(DEVICES)}.')
    ranks, timeout = plain(ranks), plain(timeout)
    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
        raise ParameterError(f"ranks = {ranks!r}: give a whole number of at least 1.")
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and 0 < timeout < math.inf):
        raise ParameterError(f"timeout = {timeout!r}: give a number of seconds, or None.")
    context = _context_of(spark)
    count = ranks or task_slots(context, resource_profile)
    if ranks is None and device != "cpu" and is_local(context):
        count = min(count, torch.cuda.device_count() or count)
    gang = Gang(
        context,
        context.parallelize(range(count), count),
        f"sparkdl-gang-{secrets.token_hex(8)}",
        device=device,
        timeout=timeout,
        output=output,
        retried=False,
        profile=resource_profile,
    )
    with contextlib.closing(gang):
        gang.start()
        if ranks is None:
            check_unshared(gang.where)
        name = getattr(fn, "__name__", type(fn).__name__)
        return gang.call(functools.partial(_call, accompanied(fn), args, kwargs), name)


def _context_of(spark: SparkSession | None) -> SparkContext:
    """Return the SparkContext of the session, or the active one."""
    context = SparkContext._active_spark_context if spark is None else getattr(spark, "_sc", None)
    if context is None and spark is not None:
        raise SessionError(
            f"spark is a {type(spark).__module__}.{type(spark).__qualname__}, and ranks are tasks of a "
            "classic SparkSession: Spark Connect has no RDDs. Start one, with sparkdl.session(master)."
        )
    if context is None or context._jsc is None:
        raise SessionError("no Spark session is active: start one, with sparkdl.session(master).")
    return context


def _call(fn: Callable[..., Any], args: Any, kwargs: Any, member: RankContext) -> Any:
    result = fn(*args, **kwargs)
    return mapped(result, torch.Tensor, torch.Tensor.cpu)  # the driver may have no GPU
