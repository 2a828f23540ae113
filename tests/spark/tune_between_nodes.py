"""Script: search on executors whose slab roots are apart, so that each needs a copy of the samples.

Answers with the rows of the table, the digest of the best model, and the files on the nodes while the
search runs and after it.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import sparkdl
from sparkdl import tune

SPACE = {"optimizer.lr": tune.loguniform(1e-3, 1e-1), "model.hidden": [4, 8]}


def model(hidden: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def frame(spark: Any) -> Any:
    generator = np.random.default_rng(0)
    rows = [
        (generator.normal(size=3).astype("float32").tolist(), int(generator.integers(3)))
        for _ in range(90)
    ]
    return spark.createDataFrame(rows, "features array<float>, label long")


def search(spark: Any, **more: Any) -> tune.SearchResult:
    df = frame(spark)
    trainer = sparkdl.Trainer(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch_size=20,
        stop=sparkdl.max_epoch(2),
        validation=sparkdl.Validation(df, metrics=["accuracy"]),
        **more,
    )
    return tune.search(trainer, df, SPACE, trials=6, parallel=4)


def table(result: tune.SearchResult) -> list[dict[str, Any]]:
    """The rows without the times."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result.rows()]


class Look(sparkdl.Callback):
    """Notes, in a file, the sample files of its node, and lets others begin meanwhile."""

    def __init__(self, notes: str) -> None:
        self.notes = notes

    def on_fit_start(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        time.sleep(1)

    def on_fit_end(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        found = list(Path("slabs").resolve().glob("*/*.values"))
        Path(self.notes, f"{abs(hash(str(found)))}").write_text("\n".join(map(str, found)))


def main() -> None:
    from launch import answer, digest, session, spec

    notes = Path("notes").resolve()
    notes.mkdir()
    with session(spec()["master"], **{"spark.sparkdl.slab.dir": "slabs"}) as spark:
        spark.sparkContext.parallelize(range(8), 8).count()  # until all executors are known
        result = search(spark, callbacks=[Look(str(notes))])
        files = {line for note in notes.iterdir() for line in note.read_text().splitlines()}
        answer(
            {
                "table": table(result),
                "digest": digest(result.best_model.module),
                "nodes": len({Path(file).parents[1] for file in files}),
                "names": len({Path(file).name for file in files}),
                "files": len(files),
                "left": [file for file in files if Path(file).exists()],
            }
        )


if __name__ == "__main__":
    main()
