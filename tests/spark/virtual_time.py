"""A clock that a model turns itself, for the local engine."""

from __future__ import annotations

_now = 0.0


def now() -> float:
    return _now


def sleep(seconds: float) -> None:
    global _now
    _now += seconds
