"""The ``spark.sparkdl.*`` keys, and the Spark settings that are needed for speed.

No other module names a key. :data:`SETTINGS` documents sparkdl's own keys. :data:`SPARK_SETTINGS`
lists the keys of Spark that :func:`sparkdl.session` and ``conf/spark-defaults.conf`` set, each with
the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

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
    seconds: bool = False  # a number of them, or "off"
    zero: bool = False  # 0 is allowed too

    @property
    def wanted(self) -> str:
        """The remedy, for an error."""
        if self.choices:
            return f"use one of {', '.join(self.choices)}"
        example, above = self.default.replace("off", "60"), "" if self.zero else " above 0"
        return f"give a number of seconds{above}, such as {example}, or off"

    def value(self, text: str) -> Any:
        """Return the value of a text. Raises ValueError."""
        if self.choices and text not in self.choices:
            raise ValueError(text)
        if "on" in self.choices:
            return text == "on"
        if not self.seconds:
            return text
        number = None if text == "off" else float(text)
        if number is None or 0 < number < math.inf or (self.zero and number == 0):
            return number
        raise ValueError(text)


def _setting(key: str, **how: Any) -> Any:
    setting = Setting(**how)
    return field(default=setting.value(setting.default), metadata={PREFIX + key: setting})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The checked ``spark.sparkdl.*`` values of a session; None for what is off."""

    slab_dir: str = _setting(
        "slab.dir",
        default="auto",
        doc="Directory of the node-local slabs. 'auto': /dev/shm while it has room and a tenth of the "
        "memory (2 GiB at most) is left, then Spark's local directory. A relative path is taken from "
        "the executor's working directory, so that executors of one host stay apart. A slab root "
        "inside it has mode 0700, a random name, and is removed when the run ends.",
    )
    stages: str = _setting(
        "stages",
        default="auto",
        doc="Spark stages of an iteration. 'two': forward-backward, then synchronization. 'one': "
        "each replica makes the whole update itself before its next forward, where all replicas are "
        "on one node and the gradient is not clipped by its norm. 'auto': one where that is faster, "
        "by the update's measured time. On one node two stages are two jobs; 'shuffle': they are one "
        "job, with a shuffle between them, as between nodes. The bits are the same.",
        choices=("auto", "one", "two", "shuffle"),
    )
    snapshot_seconds: float | None = _setting(
        "snapshot.seconds",
        default="30",
        doc="How often Spark is given a copy of the state to keep on the disks of two executors, so "
        "that what is lost with an executor costs no more than so many seconds of training. Less "
        "often where snapshots would take more than a twentieth of the time; '0': after every "
        "iteration; 'off': never, a run then goes on from its last checkpoint, or begins again. In "
        "local[...] none are taken: there is nothing that could be lost alone.",
        zero=True,
        seconds=True,
    )
    timeout: float | None = _setting(
        "timeout.seconds",
        default="1800",
        doc="How long nothing may happen in a job of a fit, no task starting or ending, before the "
        "fit ends with an error that names the tasks that were waited for and their executors. "
        "'off': it waits for ever. In a gang it bounds each command as a whole: coming together, an "
        "iteration, a validation, writing a checkpoint.",
        seconds=True,
    )
    client_seconds: float | None = _setting(
        "client.seconds",
        default="off",
        doc="In a session of Spark Connect: how long a fit may hear nothing from its client, which "
        "calls every few seconds, before it ends after its iteration, writes its last checkpoint and "
        "frees its slots. Give 60 or more: a busy server is slow to pass a call on. 'off': it goes on "
        "until Spark ends the query of a client that went away. Without effect where the server cannot "
        "reach rank 0.",
        seconds=True,
    )
    progress: str = _setting(
        "progress",
        default="auto",
        doc="What a fit shows of its progress. 'auto': a bar on a terminal and in notebooks, where "
        "curves are below it; elsewhere "
        "a line of the logger 'sparkdl' every 30 seconds, which goes to the standard error where "
        "logging is not configured. 'true': the bar, anywhere. 'false': nothing.",
        choices=("auto", "true", "false"),
    )
    care: bool = _setting(
        "care",
        default="on",
        doc="The dry run before the first iteration: a few rows pass through the model on the driver "
        "as a whole and in two parts, and what makes the result another one than that of one process "
        "is an error or a warning. 'off': one pass is made, which a fit needs to know the output.",
        choices=("on", "off"),
    )
    plan_cache: bool = _setting(
        "plan.cache",
        default="on",
        doc="Plans keep what an application costs on this master, and what fits took beside their "
        "predictions, in sparkdl/plans.json of the user's cache directory ($XDG_CACHE_HOME, else "
        "~/.cache), 200 rows at most. 'off': nothing is read from there or written.",
        choices=("on", "off"),
    )

    @staticmethod
    def read(get: Callable[[str, str], str], keys: list[str]) -> Settings:
        """Return the settings that ``get(key, default)`` gives, of which ``keys`` are set."""
        problems = [
            f'unknown setting "{key}".{nearest(key, SETTINGS)} Known: {", ".join(SETTINGS)}.'
            for key in keys
            if key not in SETTINGS
        ]
        values = {}
        for one in fields(Settings):
            ((key, setting),) = one.metadata.items()
            text = get(key, setting.default)
            try:
                values[one.name] = setting.value(text)
            except ValueError:
                problems.append(f'{key} = "{text}": {setting.wanted}.')
        raise_all(ParameterError, problems)
        return Settings(**values)


SETTINGS = {key: setting for one in fields(Settings) for key, setting in one.metadata.items()}
"""The settings by their keys."""

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
