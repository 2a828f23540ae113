"""The live replica of this process, kept between tasks.

Only a cache: Spark hands tasks to pooled workers in any order and drops idle ones, so an entry may
be missing at any time, and building it again gives the same replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.recipe import Recipe
from sparkdl.slab.gpu_memory import make_room
from sparkdl.spark.device import task_device

MAX_LIVE_REPLICAS = 2


_live: OrderedDict[tuple[str, torch.device], LiveReplica] = OrderedDict()


def live_replica(
    run: str, load: Callable[[], Recipe], on_gpu: Callable[[], None] = lambda: None
) -> LiveReplica:
    """The replica of ``run`` on this task's device; ``load`` gives its recipe on a miss. ``on_gpu``:
    called where there is one more on a GPU from here on."""
    device = task_device()
    replica = _live.get((run, device))
    if replica is None:
        if device.type == "cuda":
            make_room()
            on_gpu()
        replica = _live[run, device] = LiveReplica.of(load(), device)
        while len(_live) > MAX_LIVE_REPLICAS:
            _live.popitem(last=False)
    _live.move_to_end((run, device))
    return replica


def forget(run: str) -> None:
    """Drop the replica of ``run`` from this process."""
    for key in [key for key in list(_live) if key[0] == run]:
        _live.pop(key, None)  # a thread may have done so
