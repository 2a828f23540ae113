"""The number of tasks, or ranks of a gang, that can run at once."""

from __future__ import annotations

import logging
import time
from typing import Any

from py4j.protocol import Py4JError
from pyspark import RDD, SparkContext
from pyspark.errors import PySparkException
from pyspark.resource import ResourceProfile

from sparkdl.errors import ParameterError, SessionError, counted
from sparkdl.spark.frames import is_local

logger = logging.getLogger("sparkdl")
SLOT_SECONDS = 30.0
"""The time that executors have to register before too few task slots are an error, or are accepted."""


def slots_now(context: SparkContext, profile: ResourceProfile | None = None) -> int:
    """Return the number of tasks of ``profile`` that the present executors can run at once."""
    return _count(context, in_java(context, profile))


def task_slots(
    context: SparkContext, profile: ResourceProfile | None = None, seconds: float = SLOT_SECONDS
) -> int:
    """Return the number of tasks that can run at once, at least 1."""
    if profile is not None:
        check_profile(profile, is_local(context))
    given, began, fixed = in_java(context, profile), time.monotonic(), is_local(context)
    while not (slots := _count(context, given)):
        if fixed or time.monotonic() - began >= seconds:
            return 1
        time.sleep(0.2)
    return slots


def default_replicas(context: SparkContext, seconds: float = SLOT_SECONDS) -> int:
    """Return the default number of replicas: the number of tasks that can run at once.

    ``spark.default.parallelism`` makes it smaller but never larger. Clusters set it for queries, to
    several times their cores, and a replica that waits for a slot only makes an iteration longer.
    If the number may surprise the user, a warning is logged.
    """
    slots, conf = task_slots(context, seconds=seconds), context._conf
    wanted = int(conf.get("spark.default.parallelism", "") or slots)
    if wanted > slots:
        logger.warning(
            "training with %d replicas, as many as tasks run at once here; "
            "spark.default.parallelism=%d is for queries. Give Trainer(replicas=...) for others.",
            slots,
            wanted,
        )
    elif conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        logger.warning(
            "training with %d replicas, as many as tasks run at once on the executors that are here "
            "now; spark.dynamicAllocation.enabled lets others come later. Give Trainer(replicas=...) "
            "for more.",
            min(slots, wanted),
        )
    return max(1, min(slots, wanted))


def check_slots(
    context: SparkContext,
    ranks: int,
    seconds: float = SLOT_SECONDS,
    profile: ResourceProfile | None = None,
    min_slots: int | None = None,
    enough: int | None = None,
) -> int:
    """Wait until ``ranks`` tasks can run at once.

    Return the number that can, at most ``ranks``. After :data:`SLOT_SECONDS`, ``min_slots`` are
    accepted if there are no more; ``enough`` are accepted at once. Raise ParameterError if there
    are still too few, SessionError if this session can never run them at once.
    """
    if context._conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise no_dynamic_allocation()
    if profile is not None:
        check_profile(profile, is_local(context))
    given, began, fixed = in_java(context, profile), time.monotonic(), is_local(context)
    while (slots := _count(context, given)) < ranks:
        waited = time.monotonic() - began
        known = fixed or waited >= SLOT_SECONDS or (enough is not None and slots >= enough)
        if min_slots is not None and slots >= min_slots and known:
            return slots
        if fixed or waited >= seconds:
            raise ParameterError(too_few_slots(ranks, slots, min_slots))
        time.sleep(0.5)
    return ranks


def no_dynamic_allocation() -> SessionError:
    """Return the error to raise if a session with dynamic allocation is to have a gang."""
    return SessionError(
        "a gang needs all of its ranks at once, which Spark does not do with dynamic allocation: "
        "set spark.dynamicAllocation.enabled=false and a fixed number of executors."
    )


def _count(context: SparkContext, given: Any) -> int:
    return int(context._jsc.sc().maxNumConcurrentTasks(given))


def too_few_slots(ranks: int, slots: int, min_slots: int | None = None) -> str:
    """Return the message that a gang has too few slots."""
    gang = f"a gang of {counted(ranks, 'rank')}"
    fewer = f"at most {counted(slots, 'rank')}, or for "
    if min_slots is not None:
        gang, fewer = f"{gang} with min_ranks={min_slots}", ""
    return (
        f"{gang} needs {counted(min_slots or ranks, 'task slot')} at once, and this session has "
        f"{slots}: ask for {fewer}more executors or cores."
    )


def too_few(slots: int, ranks: int) -> str:
    """Return the message that there are fewer task slots than ranks."""
    return f"{slots} task slot{'s' * (slots > 1)} now do{'es' * (slots == 1)} the work of {ranks} ranks"


def check_profile(profile: ResourceProfile, local: bool) -> None:
    """Check that a profile requests no executors of its own, and that the session is not local."""
    if profile.executorResources:
        names = ", ".join(sorted(profile.executorResources))
        raise ParameterError(
            f"resource_profile asks for executors ({names}), which Spark starts with dynamic "
            f"allocation only, and a gang does not go with that: leave {names} out."
        )
    if local:
        raise SessionError(
            "resource_profile needs a cluster: Spark has no resource profiles in local mode. Leave it "
            "out here."
        )


def in_java(context: SparkContext, profile: ResourceProfile | None) -> Any:
    """Return the JVM's object for a profile. None stands for the default profile."""
    manager = context._jsc.sc().resourceProfileManager()
    if profile is None:
        return manager.defaultResourceProfile()
    return with_profile(context.emptyRDD(), profile)._jrdd.rdd().getResourceProfile()


def with_profile(rdd: RDD, profile: ResourceProfile) -> RDD:
    """Return ``rdd``, to be computed with ``profile``."""
    try:
        return rdd.withResources(profile)
    except (Py4JError, PySparkException) as error:
        reason = str(getattr(error, "java_exception", error)).partition("\n")[0]
        raise SessionError(f"resource_profile cannot be had here: {reason}") from None


def cpus_of(context: SparkContext, profile: ResourceProfile | None) -> int:
    """Return the number of cores of a task, which is also torch's number of threads in it."""
    request = profile.taskResources.get("cpus") if profile is not None else None
    if request is not None:
        return max(1, int(request.amount))
    return int(context._conf.get("spark.task.cpus", "1") or 1)
