"""What can be known of memory and room before a fit reads its data: whether its model can come back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import SparkContext

from sparkdl.errors import ParameterError
from sparkdl.process.memory import left_for_files, left_to_process
from sparkdl.slab.root import SHARED_MEMORY
from sparkdl.spark.frames import is_local

if TYPE_CHECKING:
    from sparkdl.model.flat import Layout
    from sparkdl.train.trainer import Trainer

SMALL_BYTES = 64 << 20
"""A model up to this size is taken to fit."""


def check_sizes(
    trainer: Trainer, layout: Layout, replicas: int, context: SparkContext, slab_dir: str
) -> None:
    """Raise :class:`sparkdl.ParameterError` for a model that this process cannot take back, or one node
    has no room to train. What is reckoned is the least that it takes."""
    if layout.nbytes <= SMALL_BYTES:
        return
    # The module, which is here for trying, and is let go of, and the vector of its weights.
    need, left = layout.nbytes, left_to_process()
    if trainer.keep_optimizer_state:
        need += layout.nbytes
    if need > left:
        raise ParameterError(
            f"the model has {_gb(layout.nbytes)} of weights, and to take it back after the training "
            f"the driver's Python needs {_gb(need)} beside what it has now: it can have {_gb(left)}. "
            "Give the driver's machine or container more memory, or freeze a part of the model."
        )
    if trainer.engine == "shuffle" and is_local(context):
        _check_room(trainer, layout, replicas, context, slab_dir)


def _check_room(
    trainer: Trainer, layout: Layout, replicas: int, context: SparkContext, slab_dir: str
) -> None:
    """Two versions of the weights, and the gradients of all replicas, lie in slabs of the one node."""
    need = 2 * layout.nbytes
    if trainer.compression is None:
        wire = trainer.policy.wire_dtype or layout.dtype
        dense = sum(s.length for s in layout.segments if s.kind == "parameter" and not s.sparse)
        need += replicas * dense * wire.itemsize
    if slab_dir == "auto":
        jvm = context._jvm
        assert jvm is not None
        local = jvm.org.apache.spark.util.Utils.getLocalDir(context._jsc.sc().conf())
        rooms = {local: _free(Path(local))}
        if os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
            rooms[str(SHARED_MEMORY)] = min(_free(SHARED_MEMORY), max(0.0, left_for_files()))
    else:
        rooms = {slab_dir: _free(Path(slab_dir).absolute())}
    if need > sum(rooms.values()):
        told = " and ".join(f"{_gb(room)} in {place}" for place, room in rooms.items())
        raise ParameterError(
            f"the model has {_gb(layout.nbytes)} of weights; two versions of them and the gradients of "
            f"{replicas} replicas take {_gb(need)} of slabs: there is room for {told}. Free some, "
            "point spark.sparkdl.slab.dir at a larger directory, or train with fewer replicas."
        )


def _free(path: Path) -> float:
    """Bytes that its file system has left; the directory may have to be made."""
    there = next(place for place in (path, *path.parents) if place.exists())
    return shutil.disk_usage(there).free


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
