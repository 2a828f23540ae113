"""Script: no room is left where slabs are, and where checkpoints are; then there is room again.

``small``: a small file system of its own. A run of 16 iterations has a checkpoint after each 4; the
second half of it, resumed, meets the fault.
"""

from __future__ import annotations

from pathlib import Path

from harness.faulty import frame, outcome, trainer
from harness.inject import at

import sparkdl


def half(spark, folder: Path, faults=(), iterations: int = 16):
    """Train up to ``iterations``, from the latest checkpoint in ``folder``."""
    kept = sparkdl.Checkpoint(folder, every=sparkdl.every(4), keep=2)
    run = trainer(2, faults, iterations, checkpoint=kept)
    return run.fit(frame(spark, 2), resume="latest")


def tried(spark, folder: Path, small: Path, notes: Path) -> dict:
    half(spark, folder, iterations=8)
    fault = at(job="fb", iteration=9, partition=0).fill_disk(small).into(notes)
    try:
        half(spark, folder, [fault])
        error = ""
    except sparkdl.SparkdlError as caught:
        error = f"{type(caught).__name__}: {caught}"
    left = sorted(path.name for path in folder.iterdir())
    (small / "ballast").unlink()
    resumed = outcome(half(spark, folder))
    return {**resumed, "struck": len(fault.told()), "error": error, "left": left}


def main() -> None:
    from launch import answer, session, spec

    given = spec()
    small, folder = Path(given["small"]), Path(given["runs"])
    results = {}
    with session("local[2,2]", **{"spark.sparkdl.slab.dir": str(small / "slabs")}) as spark:
        results["slabs"] = tried(spark, folder / "checkpoints", small, folder / "slabs full")
    with session("local[2,2]", **{"spark.sparkdl.slab.dir": str(folder / "slabs")}) as spark:
        checkpoints = small / "checkpoints"
        results["checkpoints"] = tried(spark, checkpoints, small, folder / "checkpoints full")
    answer(results)


if __name__ == "__main__":
    main()
