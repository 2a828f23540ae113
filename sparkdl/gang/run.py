"""Any function as the ranks of a ``torch.distributed`` group inside Spark."""

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
    """``fn(*args, **kwargs)`` on every rank of a gang; what the ranks return, in rank order.

    All ranks run at once, in a Spark barrier stage, each in its own Python process; the default
    process group of ``torch.distributed`` is initialised (Gloo; on GPUs with NCCL), so that
    ``dist.get_rank()`` and every collective work. ``fn`` may be any function that cloudpickle takes:
    a lambda, a nested one, one that executors can import.

    ``ranks``: how many; None: as many as there are task slots, in ``local[...]`` no more than GPUs,
    where there are some. ``device``: "cuda", "cpu" or "auto" (a
    GPU where there is one; each rank's current device is the one that Spark assigned to it).
    ``timeout``: seconds that the ranks may take to come together, that they wait for each other, and
    that the function may take; None: no bound.
    ``output``: print here, line by line, what ranks print. ``spark``: None: the active session.
    ``resource_profile``: what each rank's task is given, where that is not what others get: cores,
    GPUs, fractions of them (``pyspark.resource``); of tasks only, and on a cluster.

    Raises :class:`sparkdl.TrainingError` with rank, host and traceback of the first rank that
    fails, :class:`sparkdl.StateLostError` where one is lost (its process was killed, say); the other
    ranks have then been ended, within seconds. :class:`sparkdl.ParameterError` and
    :class:`sparkdl.SessionError` where there can be no such gang.
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
    """The SparkContext of the session, or the active one."""
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
    return mapped(result, torch.Tensor, torch.Tensor.cpu)  # the driver may be without a GPU
