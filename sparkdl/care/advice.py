"""A word after a fit whose time went elsewhere than into computing: what to change, and the gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.data.batches import Batched

ENOUGH_ITERATIONS = 50
"""The fewest iterations that say where the time of a run goes."""
_COMPUTING = ("forward", "backward")
_told: set[str] = set()


@dataclass(frozen=True)
class Spent:
    """Shares of the time of a run."""

    trainer: Any
    timings: Mapping[str, float]  # median seconds of an iteration by activity; "iteration": of all
    rows: int
    replicas: int
    slices: int
    slots: int  # tasks that run at once

    def share(self, activity: str) -> float:
        """Return the share of an activity in an iteration."""
        return min(1.0, self.timings.get(activity, 0.0) / (self.timings.get("iteration") or 1.0))

    @property
    def scheduled(self) -> bool:
        """Return whether Spark's scheduling takes most of an iteration."""
        return self.trainer.engine == "shuffle" and self.share("schedule") > 0.5

    @property
    def tasks(self) -> int:
        """Return the tasks of an iteration."""
        return self.replicas + self.slices


def _larger_batch(spent: Spent) -> str:
    """The batch at which computing takes as long as scheduling, for as many rows as there are."""
    iteration = spent.timings["iteration"]
    computing = sum(spent.timings.get(name, 0.0) for name in _COMPUTING)
    batch = spent.trainer.batch_size
    times = 1 << max(0, int(iteration / max(computing, iteration / 64)).bit_length() - 1)
    while times > 1 and batch * times > spent.rows / 10:
        times //= 2
    gain = iteration * times / (iteration + (times - 1) * computing)
    if spent.share("schedule") < 0.8 or gain < 2:
        return ""
    return (
        f"{spent.share('schedule'):.0%} of an iteration was Spark's scheduling at batch_size={batch}: "
        f"with batch_size={batch * times} an epoch takes about 1/{gain:.0f} of the time. A larger "
        "batch may want a larger learning rate"
    )


def _fewer_tasks(spent: Spent, name: str, count: int) -> str:
    fewer = spent.tasks - count + spent.slots
    saved = spent.share("schedule") * (1 - fewer / spent.tasks)
    if not spent.scheduled or count <= spent.slots or saved < 0.1:
        return ""
    return (
        f"{count} {name} share {spent.slots} task slots, and each is a task that Spark schedules: "
        f"{name}={spent.slots} saves about {saved:.0%} of an iteration"
    )


def _augmented(spent: Spent) -> str:
    share = spent.share("data")
    if spent.trainer.augment is None or share < 0.5 or isinstance(spent.trainer.augment, Batched):
        return ""
    return (
        f"{share:.0%} of an iteration was augment=, which is called for each row: "
        "augment=sparkdl.Batched(function) calls it once a batch, and saves most of that"
    )


ADVICE: dict[str, Callable[[Spent], str]] = {
    "batch_size": _larger_batch,
    "replicas": lambda spent: _fewer_tasks(spent, "replicas", spent.replicas),
    "slices": lambda spent: _fewer_tasks(spent, "slices", spent.slices),
    "augment": _augmented,
}
"""Sentences by the argument of the trainer to change; "" where that would gain little."""


def advice(spent: Spent) -> Iterator[str]:
    """Yield what to change, each once in a process."""
    for name, row in ADVICE.items():
        if name not in _told and (text := row(spent)):
            _told.add(name)
            yield f"slower than necessary: {text}."
