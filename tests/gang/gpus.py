"""Script: executors of two cores and, for all Spark knows, a GPU, which one task takes."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import numpy as np
from gang_training import CLASSES, WIDTH, trainer_of
from pyspark import cloudpickle

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def where() -> str:
    """The executor's folder."""
    return os.getcwd()


def main() -> None:
    from launch import answer, session, spec

    found = Path("gpus.sh")
    found.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0"]}\'\n')
    found.chmod(0o755)
    settings = {
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(found.resolve()),
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
        **spec()["settings"],
    }
    with session("local-cluster[2,2,1024]", **settings) as spark:
        generator, replicas, told = np.random.default_rng(1), {}, []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("sparkdl").addHandler(handler)
        rows = [
            (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES)))
            for _ in range(48)
        ]
        df = spark.createDataFrame(rows, "features array<double>, label long")
        for engine in ("shuffle", "gang", "local"):
            kept = sparkdl.Checkpoint(Path(engine), every=sparkdl.every(2), keep=1)
            trainer_of(engine=engine, replicas=None, checkpoint=kept).fit(df)
            (manifest,) = Path(engine).glob("*/manifest.json")
            replicas[engine] = json.loads(manifest.read_text())["replicas"]
        answer(
            {
                "cores": spark.sparkContext.defaultParallelism,
                "places": sparkdl.gang.run(where, device="cpu"),
                "replicas": replicas,
                "told": any("spark.default.parallelism=2000" in message for message in told),
            }
        )


if __name__ == "__main__":
    main()
