"""Every ``spark.sparkdl.*`` key, and the Spark settings that speed needs.

This is the one place where keys are named. :data:`SETTINGS` documents sparkdl's own keys;
:data:`SPARK_SETTINGS` lists Spark's keys that :func:`sparkdl.session` and
``conf/spark-defaults.conf`` set, each with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparkdl.errors import ParameterError, nearest, raise_all

PREFIX = "spark.sparkdl."


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One ``spark.sparkdl.*`` key: its default, its allowed values and what it does."""

    default: str
    doc: str
    choices: tuple[str, ...] = ()


SETTINGS: dict[str, Setting] = {
    "spark.sparkdl.slab.dir": Setting(
        default="auto",
        doc="Directory of the node-local slabs. 'auto': /dev/shm while it has room, then Spark's "
        "local directory. A relative path is taken from the executor's working directory, so "
        "that executors of one host stay apart. A slab root inside it has mode 0700, a random "
        "name, and is removed when the run ends.",
    ),
    "spark.sparkdl.stages": Setting(
        default="auto",
        doc="Spark stages of an iteration. 'two': forward-backward, then synchronization. 'one': "
        "each replica makes the whole update itself before its next forward, where all replicas are "
        "on one node and the gradient is not clipped by its norm. 'auto': one where that is faster, "
        "by the update's measured time. The bits are the same.",
        choices=("auto", "one", "two"),
    ),
    "spark.sparkdl.progress": Setting(
        default="auto",
        doc="Progress bar while fitting. 'auto': on a terminal and in notebooks only.",
        choices=("auto", "true", "false"),
    ),
}

SPARK_SETTINGS: dict[str, tuple[str, str]] = {
    "spark.python.unix.domain.socket.enabled": (
        "true",
        "over loopback TCP each Python task loses 40 ms to delayed ACKs",
    ),
    "spark.python.daemon.module": (
        "sparkdl.daemon",
        "each Python worker imports torch for itself otherwise: seconds, and 200 MB of memory",
    ),
    "spark.shuffle.compress": (
        "false",
        "float gradients do not compress; compressing them costs CPU for nothing",
    ),
    "spark.broadcast.blockSize": (
        "256k",
        "each stage broadcasts its tasks, some kB, in a fresh block of this size: 4 MB by default",
    ),
    "spark.shuffle.reduceLocality.enabled": (
        "false",
        "only a slice's state, not its gradients, should decide where it is synchronized",
    ),
    "spark.ui.showConsoleProgress": ("false", "sparkdl draws its own progress bar"),
    "spark.log.level": ("ERROR", "keeps the console readable; warnings stay in the Spark UI"),
}
"""Key -> (value, reason)."""

NEEDED_FOR_SPEED = (
    "spark.python.unix.domain.socket.enabled",
    "spark.python.daemon.module",
    "spark.shuffle.compress",
)
"""Those that cost time when they are missing; fit says so once."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The resolved ``spark.sparkdl.*`` values of a session."""

    slab_dir: str = "auto"
    progress: str = "auto"
    stages: str = "auto"

    @staticmethod
    def read(get: Callable[[str, str], str], keys: list[str]) -> Settings:
        """Resolve from ``get(key, default)``; ``keys`` are the ``spark.sparkdl.*`` keys that are set.

        Raises :class:`sparkdl.ParameterError` for an unknown key or a value outside its choices.
        """
        problems = [
            f'unknown setting "{key}".{nearest(key, SETTINGS)} Known: {", ".join(SETTINGS)}.'
            for key in keys
            if key not in SETTINGS
        ]
        values = {key: get(key, setting.default) for key, setting in SETTINGS.items()}
        problems += [
            f'{key} = "{values[key]}": use one of {", ".join(setting.choices)}.'
            for key, setting in SETTINGS.items()
            if setting.choices and values[key] not in setting.choices
        ]
        raise_all(ParameterError, problems)
        return Settings(
            slab_dir=values["spark.sparkdl.slab.dir"],
            progress=values["spark.sparkdl.progress"],
            stages=values["spark.sparkdl.stages"],
        )
