"""A function that runs any function on the ranks of a ``torch.distributed`` group inside Spark."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pyspark import SparkContext, cloudpickle
from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from sparkdl.codec.safe import mapped
from sparkdl.errors import (
    ParameterError,
    SessionError,
    TrainingError,
    in_quotes,
    kind_of,
    pickling,
    shown,
)
from sparkdl.gang.connect import check_slots_of, run_led, slots_of
from sparkdl.gang.driver import Gang
from sparkdl.gang.led import RESULT, LedGang, LedTask
from sparkdl.gang.process_group import check_unshared, tell_of_other_gpu
from sparkdl.gang.rank_task import RankContext, packed_result
from sparkdl.gang.slots import task_slots
from sparkdl.plain import is_number, is_whole, plain
from sparkdl.session import check_running, is_connected
from sparkdl.spark.broadcasts import Artifact, received_bytes, sent_bytes
from sparkdl.spark.failures import end_of_session_explained, faults_explained
from sparkdl.spark.frames import is_local
from sparkdl.usercode import accompanied

DEVICES = ("auto", "cpu", "cuda")
MOST_BYTES = 128_000_000
"""The largest results that come back over Spark Connect: the server holds all of them at once."""


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
        spark: The session, classic or of Spark Connect. None means the active one.
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
        raise ParameterError(f"device = {in_quotes(device)}: use one of {', '.join(DEVICES)}.")
    ranks, timeout = plain(ranks), plain(timeout)
    if ranks is not None and not is_whole(ranks, 1):
        raise ParameterError(f"ranks = {shown(ranks)}: give a whole number of at least 1.")
    if timeout is not None and not (is_number(timeout) and timeout > 0):
        raise ParameterError(f"timeout = {shown(timeout)}: give a number of seconds, or None.")
    session, name = _connected(spark), getattr(fn, "__name__", type(fn).__name__)
    remedy = "Open files, locks and sessions inside it."
    with pickling(f"{name}, or an argument of it,", remedy):
        call: bytes = cloudpickle.dumps(accompanied((fn, args, kwargs)))
    if session is not None:
        check_running(session)
        work = _LedCall(name, sent_bytes(call, "call", session), ranks is None)
        with end_of_session_explained(session), faults_explained(name):
            count = ranks or slots_of(session, resource_profile)
            check_slots_of(session, count, resource_profile)
            task = LedTask(work, device, timeout, output)
            found = run_led(session.range(0, count, 1, count), task, count, resource_profile)
        results: list[Any] = cloudpickle.loads(found[RESULT])
        return results
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
        return gang.call(functools.partial(_call, call), name)


def _context_of(spark: SparkSession | None) -> SparkContext:
    """Return the SparkContext of the session, or the active one."""
    context = SparkContext._active_spark_context if spark is None else getattr(spark, "_sc", None)
    if context is None or context._jsc is None:
        raise SessionError("no Spark session is active: start one, with sparkdl.session(master).")
    return context


def _connected(spark: SparkSession | None) -> Any:
    """Return the session if it is one of Spark Connect, else None."""
    if spark is None and is_remote():
        spark = SparkSession.getActiveSession()
    return spark if is_connected(spark) else None


@dataclass(frozen=True)
class _LedCall:
    """The call of a function on every rank, as the work of a gang that rank 0 leads."""

    name: str
    call: bytes | Artifact
    by_slots: bool

    def begin(self, batches: Iterable[Any]) -> list[Any]:
        for _ in batches:
            pass
        return []

    def lead(self, gang: LedGang, frames: list[list[Any]]) -> Iterator[tuple[str, bytes]]:
        gang.start()
        if self.by_slots:
            check_unshared(gang.where)
        call = functools.partial(_call, received_bytes(self.call))
        results = packed_result(gang.call(call, self.name))
        if len(results) > MOST_BYTES:
            raise TrainingError(
                f"{self.name}: the results of the ranks have {len(results) / 1e6:,.0f} MB, and a Spark "
                f"Connect session returns at most {MOST_BYTES / 1e6:,.0f} MB: write them to files, and "
                "return where they are."
            )
        yield RESULT, results

    def end(self) -> None:
        pass


def _call(call: bytes, member: RankContext) -> Any:
    tell_of_other_gpu(member)
    fn, args, kwargs = cloudpickle.loads(call)
    result = fn(*args, **kwargs)
    return mapped(result, torch.Tensor, torch.Tensor.cpu)  # the driver may have no GPU
