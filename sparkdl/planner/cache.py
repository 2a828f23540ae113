"""The cache of plans, for the next one: predictions, what fits then took, and probes of sessions.

They are in ``plans.json`` in the user's cache directory, :data:`MOST` rows at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from sparkdl.planner.choice import Choice
from sparkdl.planner.probe import Probe
from sparkdl.settings import __version__

MOST = 200
"""The most rows that are kept."""
SECONDS = 30 * 86400
"""How long the probe of a session counts."""


def place() -> Path:
    """Return the file of the user's plans."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sparkdl" / "plans.json"


def digest(*parts: object) -> str:
    """Return a short name for what a row depends on."""
    return hashlib.sha256(repr((__version__, *parts)).encode()).hexdigest()[:20]


class PlanCache:
    """Rows of this process, and those of the file where they are ``shared`` with other processes."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}

    def note_plan(self, key: str, choice: Choice, seconds: float) -> None:
        """Note a prediction of this process, with which a fit is compared."""
        self._rows[f"planned {key} {choice}"] = {"seconds": seconds}

    def planned(self, key: str, choice: Choice) -> float | None:
        """Return the prediction for a fit, if this process has made one."""
        row = self._rows.get(f"planned {key} {choice}")
        return None if row is None else float(row["seconds"])

    def measured(self, key: str, choice: Choice, shared: bool) -> float | None:
        """Return the seconds of an iteration that an earlier fit took."""
        seconds = self._find(f"{key} {choice}", shared).get("measured")
        return float(seconds) if isinstance(seconds, (int, float)) and seconds > 0 else None

    def keep_measured(self, key: str, choice: Choice, seconds: float, shared: bool) -> None:
        """Keep what a fit took beside its prediction."""
        row = {"planned": self.planned(key, choice), "measured": seconds}
        self._keep(f"{key} {choice}", row, shared)

    def probe(self, key: str, shared: bool) -> Probe | None:
        """Return the probe of such a session, if it is known and not old."""
        row = self._find(f"probe {key}", shared)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if time.time() - row["at"] < SECONDS:
                fields = dict(row["probe"])
                overheads = {(str(n), int(m)): float(s) for n, m, s in fields.pop("overheads")}
                sums = {int(r): [(int(n), float(s)) for n, s in p] for r, p in fields.pop("sums")}
                return Probe(**fields, overheads=overheads, sums=sums)
        return None

    def keep_probe(self, key: str, probe: Probe, shared: bool) -> None:
        """Keep the probe of a session for its like."""
        plain = {f.name: getattr(probe, f.name) for f in dataclasses.fields(probe)}
        plain["overheads"] = [[name, n, seconds] for (name, n), seconds in probe.overheads.items()]
        plain["sums"] = [[ranks, [*points]] for ranks, points in probe.sums.items()]
        self._keep(f"probe {key}", {"probe": plain}, shared)

    def _find(self, name: str, shared: bool) -> dict[str, Any]:
        return self._rows.get(name) or (_read().get(name, {}) if shared else {})

    def _keep(self, name: str, row: dict[str, Any], shared: bool) -> None:
        self._rows[name] = row = {**row, "at": time.time()}
        if shared:
            rows = {**_read(), name: row}
            newest = sorted(rows.items(), key=lambda item: item[1].get("at", 0.0))[-MOST:]
            with contextlib.suppress(OSError):  # a home that cannot be written harms no fit
                place().parent.mkdir(parents=True, exist_ok=True)
                beside = place().with_suffix(f".{os.getpid()}")
                beside.write_text(json.dumps(dict(newest), indent=1), encoding="utf-8")
                beside.replace(place())


def _read() -> dict[str, dict[str, Any]]:
    """Return the rows of the file; none where it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        content = json.loads(place().read_text(encoding="utf-8"))
        return {name: row for name, row in content.items() if isinstance(row, dict)}
    return {}


CACHE = PlanCache()
"""The plans that this process knows."""
