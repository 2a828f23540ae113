"""Script: executors hold slabs of a fit, and its persisted partitions lie elsewhere when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
from pyspark import StorageLevel

from sparkdl.frames import map_frames
from sparkdl.slab.root import SlabConfig, open_root
from sparkdl.train.neighbours import executors, one_each
from sparkdl.train.resources import Resources

CASES = ("none", "one", "both")
"""Which executors hold the persisted partition in the end."""


class WriteSlab:
    """Task that makes the root of ``slab``."""

    def __init__(self, slab: SlabConfig) -> None:
        self.slab = slab

    def __call__(self, partition: int, frames: Any) -> Iterator[bytes]:
        list(frames)
        open_root(self.slab, create=True)
        yield b""


def roots() -> int:
    return len(list(Path.cwd().glob("spark/work/*/*/slabs/sparkdl-*")))


def main() -> None:
    import sys

    from launch import answer, session, spec

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    results = {}
    with session(spec()["master"], **{"spark.sparkdl.slab.dir": "slabs"}) as spark:
        context = spark.sparkContext
        context.parallelize(range(8), 8).count()
        for case in CASES:
            slab = SlabConfig.new("slabs", context.applicationId)
            with Resources(context, slab) as resources:
                found = executors(context)
                map_frames(one_each(context, found), WriteSlab(slab)).count()
                if case != "none":
                    made = map_frames(one_each(context, found[:1]), WriteSlab(slab))
                    level = StorageLevel.DISK_ONLY_2 if case == "both" else StorageLevel.DISK_ONLY
                    resources._rdds.append(made.persist(level))
                    made.count()
                held = roots()
            results[case] = [held, roots()]
    answer(results)


if __name__ == "__main__":
    main()
