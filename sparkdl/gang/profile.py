"""What each rank's task of a gang is given, where that is not what other tasks get."""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.core.rdd import RDD
from pyspark.errors import PySparkException
from pyspark.resource import ResourceProfile

from sparkdl.errors import ParameterError, SessionError
from sparkdl.session import conf_of
from sparkdl.spark.frames import is_local


def check_profile(context: SparkContext, profile: ResourceProfile) -> None:
    """Raise :class:`ParameterError` for a profile that asks for executors of its own, which Spark
    starts with dynamic allocation only; :class:`SessionError` in local mode, which has no profiles."""
    if profile.executorResources:
        names = ", ".join(sorted(profile.executorResources))
        raise ParameterError(
            f"resource_profile asks for executors ({names}), which Spark starts with dynamic "
            f"allocation only, and a gang does not go with that: leave {names} out."
        )
    if is_local(context):
        raise SessionError(
            "resource_profile needs a cluster: Spark has no resource profiles in local mode. Leave it "
            "out here."
        )


def in_java(context: SparkContext, profile: ResourceProfile | None) -> Any:
    """The JVM's own, None: the default one's."""
    manager = context._jsc.sc().resourceProfileManager()
    if profile is None:
        return manager.defaultResourceProfile()
    return with_profile(context.emptyRDD(), profile)._jrdd.rdd().getResourceProfile()


def with_profile(rdd: RDD, profile: ResourceProfile) -> RDD:
    """``rdd``, computed with it. Raises :class:`SessionError` where this cluster has no profiles."""
    try:
        return rdd.withResources(profile)
    except (Py4JError, PySparkException) as error:
        reason = str(getattr(error, "java_exception", error)).partition("\n")[0]
        raise SessionError(f"resource_profile cannot be had here: {reason}") from None


def cpus_of(context: SparkContext, profile: ResourceProfile | None) -> int:
    """Cores of a task, and so torch's threads in it."""
    request = profile.taskResources.get("cpus") if profile is not None else None
    if request is not None:
        return max(1, int(request.amount))
    return int(conf_of(context).get("spark.task.cpus", "1") or 1)
