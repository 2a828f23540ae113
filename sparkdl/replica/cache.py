"""The live replica of this process, kept between tasks.

Only a cache: Spark hands tasks to pooled workers in any order and drops idle ones, so an entry may
be missing at any time, and building it again gives the same replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.replica.care import runnable
from sparkdl.replica.flat import FlatModule
from sparkdl.replica.recipe import Recipe

MAX_LIVE_REPLICAS = 2


@dataclass
class LiveReplica:
    """A built recipe. ``call`` runs the module; ``version`` names the weights that ``flat.flat``
    holds now."""

    recipe: Recipe
    flat: FlatModule
    call: Callable[..., Any]
    version: str = ""

    @staticmethod
    def of(recipe: Recipe, device: torch.device | str = "cpu") -> LiveReplica:
        """Build ``recipe`` on ``device``."""
        flat = FlatModule(recipe.build(), device)
        return LiveReplica(recipe, flat, runnable(flat.module, recipe.policy))

    def clear_gradients(self) -> None:
        """Let go of every parameter's gradient."""
        for _, parameter in self.flat.parameters:
            parameter.grad = None


_live: OrderedDict[str, LiveReplica] = OrderedDict()


def live_replica(run: str, load: Callable[[], Recipe]) -> LiveReplica:
    """The replica of ``run``; ``load`` gives its recipe on a miss."""
    replica = _live.get(run)
    if replica is None:
        replica = _live[run] = LiveReplica.of(load(), task_device())
        while len(_live) > MAX_LIVE_REPLICAS:
            _live.popitem(last=False)
    _live.move_to_end(run)
    return replica


def forget(run: str) -> None:
    """Drop the replica of ``run`` from this process."""
    _live.pop(run, None)


def task_device() -> torch.device:
    """The GPU that Spark assigned to this task, else any GPU, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    from pyspark import TaskContext

    context = TaskContext.get()
    gpu = context.resources().get("gpu") if context else None
    return torch.device("cuda", int(gpu.addresses[0]) if gpu else 0)
