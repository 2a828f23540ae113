"""Spark waits for the executors that samples and state are on, whatever the session says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext

WAIT = "spark.locality.wait"
ENOUGH_SECONDS = 3.0
"""Spark's own default."""
ONE_SECONDS = 60.0
"""How long a task that is for one executor, and would do nothing elsewhere, waits for it."""


_set: dict[str, tuple[int, str | None]] = {}
"""Of each setting: in how many blocks of now it is ours, and what it was before the first."""
_lock = threading.Lock()


@contextlib.contextmanager
def waiting_for_locality(context: SparkContext) -> Iterator[None]:
    """Inside the block Spark keeps a task for its executor for :data:`ENOUGH_SECONDS` at least.

    Sessions set it to 0 for the sake of queries. A task of ours that runs elsewhere than its state can
    do nothing, and where there are more of them than slots Spark would send some elsewhere each time.
    Spark looks it up as a stage begins; the three finer settings, if given, stay as they are.
    """
    sc = context._jsc.sc() if context._jsc is not None else None
    if sc is None or sc.isLocal():
        yield
        return
    enough = sc.conf().getTimeAsMs(WAIT, "3s") >= ENOUGH_SECONDS * 1000 and WAIT not in _set
    with contextlib.nullcontext() if enough else _setting(sc.conf(), WAIT, ENOUGH_SECONDS):
        yield


@contextlib.contextmanager
def executor_awaited(context: SparkContext) -> Iterator[None]:
    """Inside the block a task goes to the executor it is for, or, where that is lost, to another."""
    with _setting(context._jsc.sc().conf(), f"{WAIT}.process", ONE_SECONDS):  # type: ignore[union-attr]
        yield


@contextlib.contextmanager
def _setting(conf: Any, key: str, seconds: float) -> Iterator[None]:
    """Inside the block ``key`` is so many seconds, and what it was before once the last of such blocks
    has ended: two fits of a session may train at once."""
    with _lock:
        count, before = _set.get(key, (0, None))
        if count == 0:
            before = conf.get(key) if conf.contains(key) else None
            conf.set(key, f"{seconds:g}s")
        _set[key] = count + 1, before
    try:
        yield
    finally:
        with _lock, contextlib.suppress(Py4JError):  # the session may be gone
            count, before = _set.pop(key)
            if count > 1:
                _set[key] = count - 1, before
            elif before is None:
                conf.remove(key)
            else:
                conf.set(key, before)
