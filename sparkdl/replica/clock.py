"""Real seconds, by activity."""

from __future__ import annotations

import time


class Clock:
    """Seconds by activity since the clock was made; an activity that comes again adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, activity: str) -> None:
        """Book the time since the last lap to ``activity``."""
        now = time.perf_counter()
        self.seconds[activity] = self.seconds.get(activity, 0.0) + now - self._last
        self._last = now
