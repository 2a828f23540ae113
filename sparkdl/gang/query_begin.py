"""The beginning of a gang's query in a session of Spark Connect, from Spark's progress reports."""

from __future__ import annotations

import threading
import time
from typing import Any

_at_work: set[tuple[str, str]] = set()
"""The gangs of this process whose tasks run: the id of the session and the tag of the query."""


class QueryBegin:
    """A listener that knows whether the tasks of a query run. Use it as a context manager.

    Spark reports what has changed, in the thread that awaits the query, which creates the listener.
    """

    def __init__(self, session: Any, tag: str) -> None:
        self._session, self._gang = session, (session.session_id, tag)
        self._thread, self._idle_since = threading.get_ident(), time.monotonic()

    @property
    def begun(self) -> bool:
        """Return whether tasks run."""
        return self._gang in _at_work

    def idle_seconds(self) -> float:
        """Return for how long no task has run, of this query or another gang of this process.

        A query may wait for such a gang for as long as that takes.
        """
        now = time.monotonic()
        if any(session_id == self._gang[0] for session_id, _ in list(_at_work)):
            self._idle_since = now
        return now - self._idle_since

    def _hear(self, *, inflight_tasks: int, **others: Any) -> None:
        if threading.get_ident() != self._thread:  # another query of the session
            return
        if inflight_tasks:
            _at_work.add(self._gang)
        elif self.begun:
            _at_work.discard(self._gang)
            self._idle_since = time.monotonic()

    def __enter__(self) -> QueryBegin:
        self._session.registerProgressHandler(self._hear)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._session.removeProgressHandler(self._hear)
        _at_work.discard(self._gang)
