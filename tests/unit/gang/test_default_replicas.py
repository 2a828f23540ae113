"""How many replicas there are where nobody says it: as many as run at once, and surprises are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.gang import slots


@pytest.mark.parametrize(
    ("settings", "replicas", "told"),
    [
        ({}, 4, []),
        ({"default.parallelism": "2"}, 2, []),
        ({"default.parallelism": "2000"}, 4, ["parallelism=2000 is for queries"]),
        ({"dynamicAllocation.enabled": "true"}, 4, ["with 4 replicas, as many as tasks run at"]),
        ({"dynamicAllocation.enabled": "true", "default.parallelism": "2"}, 2, ["with 2 replicas"]),
    ],
)
def test_as_many_as_tasks_run_at_once(
    settings: dict[str, str], replicas: int, told: list[str], monkeypatch: Any, caplog: Any
) -> None:
    conf = {f"spark.{key}": value for key, value in settings.items()}
    monkeypatch.setattr(slots, "task_slots", lambda context, seconds: 4)
    assert slots.default_replicas(SimpleNamespace(_conf=conf)) == replicas  # type: ignore[arg-type]
    assert len(caplog.messages) == len(told)
    assert all(text in message for text, message in zip(told, caplog.messages, strict=True))
