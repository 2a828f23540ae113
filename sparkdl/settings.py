"""The ``spark.sparkdl.*`` keys, and the Spark settings that are needed for speed.

No other module names a key. :data:`SETTINGS` documents sparkdl's own keys. :data:`SPARK_SETTINGS`
lists the keys of Spark that :func:`sparkdl.session` and ``conf/spark-defaults.conf`` set, each with
the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sparkdl.errors import ParameterError, nearest, raise_all

__version__ = "0.1.0"
"""The package's version."""
DISTRIBUTION = "sparkdl-torch"
"""The name by which pip knows the package; another project's distribution is named sparkdl."""
PREFIX = "spark.sparkdl."


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A ``spark.sparkdl.*`` key."""

    default: str
    doc: str
    choices: tuple[str, ...] = ()  # (): not a fixed set
    zero: bool = False  # 0 is allowed too; only for a number of seconds


SETTINGS: dict[str, Setting] = {
    "spark.sparkdl.slab.dir": Setting(
        default="auto",
        doc="Directory of the node-local slabs. 'auto': /dev/shm while it has room and a tenth of the "
        "memory (2 GiB at most) is left, then Spark's local directory. A relative path is taken from "
        "the executor's working directory, so that executors of one host stay apart. A slab root "
        "inside it has mode 0700, a random name, and is removed when the run ends.",
    ),
    "spark.sparkdl.stages": Setting(
        default="auto",
        doc="Spark stages of an iteration. 'two': forward-backward, then synchronization. 'one': "
        "each replica makes the whole update itself before its next forward, where all replicas are "
        "on one node and the gradient is not clipped by its norm. 'auto': one where that is faster, "
        "by the update's measured time. On one node two stages are two jobs; 'shuffle': they are one "
        "job, with a shuffle between them, as between nodes. The bits are the same.",
        choices=("auto", "one", "two", "shuffle"),
    ),
    "spark.sparkdl.snapshot.seconds": Setting(
        default="30",
        doc="How often Spark is given a copy of the state to keep on the disks of two executors, so "
        "that what is lost with an executor costs no more than so many seconds of training. Less "
        "often where snapshots would take more than a twentieth of the time; '0': after every "
        "iteration; 'off': never, a run then goes on from its last checkpoint, or begins again. In "
        "local[...] none are taken: there is nothing that could be lost alone.",
        zero=True,
    ),
    "spark.sparkdl.timeout.seconds": Setting(
        default="1800",
        doc="How long nothing may happen in a job of a fit, no task starting or ending, before the "
        "fit ends with an error that names the tasks that were waited for and their executors. "
        "'off': it waits for ever. In a gang it bounds each command as a whole: coming together, an "
        "iteration, a validation, writing a checkpoint.",
    ),
    "spark.sparkdl.client.seconds": Setting(
        default="off",
        doc="In a session of Spark Connect: how long a fit may hear nothing from its client, which "
        "calls every few seconds, before it ends after its iteration, writes its last checkpoint and "
        "frees its slots. Give 60 or more: a busy server is slow to pass a call on. 'off': it goes on "
        "until Spark ends the query of a client that went away. Without effect where the server cannot "
        "reach rank 0.",
    ),
    "spark.sparkdl.progress": Setting(
        default="auto",
        doc="What a fit shows of its progress. 'auto': a bar on a terminal and in notebooks, where "
        "curves are below it; elsewhere "
        "a line of the logger 'sparkdl' every 30 seconds, which goes to the standard error where "
        "logging is not configured. 'true': the bar, anywhere. 'false': nothing.",
        choices=("auto", "true", "false"),
    ),
    "spark.sparkdl.care": Setting(
        default="on",
        doc="The dry run before the first iteration: a few rows pass through the model on the driver "
        "as a whole and in two parts, and what makes the result another one than that of one process "
        "is an error or a warning. 'off': one pass is made, which a fit needs to know the output.",
        choices=("on", "off"),
    ),
    "spark.sparkdl.plan.cache": Setting(
        default="on",
        doc="Plans keep what an application costs on this master, and what fits took beside their "
        "predictions, in sparkdl/plans.json of the user's cache directory ($XDG_CACHE_HOME, else "
        "~/.cache), 200 rows at most. 'off': nothing is read from there or written.",
        choices=("on", "off"),
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
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": (
        "false",
        "SQL's Python tasks differ from others in it, and each kind has a daemon: torch is there twice",
    ),
    "spark.broadcast.blockSize": (
        "256k",
        "each stage broadcasts its tasks, some kB, in a fresh block of this size: 4 MB by default",
    ),
    "spark.shuffle.reduceLocality.enabled": (
        "false",
        "only a slice's state, not its gradients, should decide where it is synchronized",
    ),
    "spark.storage.cachedPeersTtl": (
        "1000",
        "executors look for others once a minute: a snapshot's second copy would miss new ones",
    ),
    "spark.ui.showConsoleProgress": ("false", "sparkdl draws its own progress bar"),
    "spark.log.level": ("ERROR", "keeps the console readable; warnings stay in the Spark UI"),
}
"""Maps each key to its value and the reason for it."""

NEEDED_FOR_SPEED = ("spark.python.unix.domain.socket.enabled", "spark.python.daemon.module")
"""The keys whose absence costs time; ``fit`` warns of it once."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The checked ``spark.sparkdl.*`` values of a session.

    Attributes:
        slab_dir: The directory of slabs, or "auto".
        progress: The display of progress: "auto", "true" or "false".
        stages: The Spark stages of an iteration: "auto", "one", "two" or "shuffle".
        snapshot_seconds: The seconds between snapshots; None takes no snapshots.
        timeout: The bound on the time without progress, in seconds; None is no bound.
        client_seconds: The time that a fit waits for a sign of its client; None is no bound.
        care: The model is tried in a dry run.
        plan_cache: Plans read and write the user's cache.
    """

    slab_dir: str = "auto"
    progress: str = "auto"
    stages: str = "auto"
    snapshot_seconds: float | None = 30.0
    timeout: float | None = 1800.0
    client_seconds: float | None = None
    care: bool = True
    plan_cache: bool = True

    @staticmethod
    def read(get: Callable[[str, str], str], keys: list[str]) -> Settings:
        """Return the settings that ``get(key, default)`` gives, of which ``keys`` are set."""
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
        durations = [key for key in SETTINGS if key.endswith(".seconds")]
        problems += [
            f'{key} = "{values[key]}": give a number of seconds'
            f"{'' if SETTINGS[key].zero else ' above 0'}, such as {_example(key)}, or off."
            for key in durations
            if values[key] != "off" and not _is_duration(values[key], SETTINGS[key].zero)
        ]
        raise_all(ParameterError, problems)
        return Settings(
            slab_dir=values["spark.sparkdl.slab.dir"],
            progress=values["spark.sparkdl.progress"],
            stages=values["spark.sparkdl.stages"],
            snapshot_seconds=_duration(values["spark.sparkdl.snapshot.seconds"]),
            timeout=_duration(values["spark.sparkdl.timeout.seconds"]),
            client_seconds=_duration(values["spark.sparkdl.client.seconds"]),
            care=values["spark.sparkdl.care"] == "on",
            plan_cache=values["spark.sparkdl.plan.cache"] == "on",
        )


def _example(key: str) -> str:
    default = SETTINGS[key].default
    return "60" if default == "off" else default


def _duration(text: str) -> float | None:
    return None if text == "off" else float(text)


def _is_duration(text: str, zero: bool) -> bool:
    try:
        seconds = float(text)
    except ValueError:
        return False
    return 0 < seconds < math.inf or (zero and seconds == 0)
