"""What a run says of its time: which argument to change, what that gains, and only once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.care import advice
from sparkdl.care.advice import Spent

SCHEDULED = {"iteration": 0.02, "schedule": 0.019, "forward": 0.0003, "backward": 0.0007}
BUSY = {"iteration": 0.02, "schedule": 0.004, "forward": 0.007, "backward": 0.008}


def spent(timings: dict[str, float], **changes: Any) -> Spent:
    trainer = {"engine": "shuffle", "batch_size": 4, "augment": None}
    counts = {"rows": 100_000, "replicas": 2, "slices": 2, "slots": 2}
    trainer |= {name: changes.pop(name) for name in trainer.keys() & changes.keys()}
    return Spent(SimpleNamespace(**trainer), timings, **{**counts, **changes})


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (spent(SCHEDULED), ["95% of an iteration was Spark's scheduling at batch_size=4: with"]),
        (spent(SCHEDULED, rows=60), []),
        (spent(SCHEDULED, batch_size=4096, rows=40_960), []),
        (
            spent(SCHEDULED, rows=60, replicas=12),
            ["12 replicas share 2 task slots, and each is a task that Spark schedules: replicas=2"],
        ),
        (
            spent(SCHEDULED, rows=60, slices=16),
            ["16 slices share 2 task slots, and each is a task that Spark schedules: slices=2"],
        ),
        (spent(BUSY, replicas=12, slices=16), []),
        (spent(SCHEDULED, engine="gang", replicas=12, rows=60), []),
        (
            spent({**BUSY, "data": 0.015}, augment=print),
            ["75% of an iteration was augment=, which is called for each row: augment=sparkdl"],
        ),
        (spent({**BUSY, "data": 0.015}), []),
    ],
    ids=lambda value: "" if isinstance(value, list) else f"{value.replicas}-{value.rows}",
)
def test_a_run_says_what_to_change(
    run: Spent, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "_told", set())
    told = [text.removeprefix("slower than necessary: ") for text in advice.advice(run)]
    assert [text[: len(start)] for text, start in zip(told, said, strict=True)] == said
    assert list(advice.advice(run)) == []
