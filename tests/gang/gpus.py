"""Script: executors of two cores and, for all Spark knows, a GPU that torch does not see."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gang_training import CLASSES, WIDTH, trainer_of
from pyspark import cloudpickle

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def where() -> str:
    """The executor's folder."""
    return os.getcwd()


def told_by(trainer: sparkdl.Trainer, df: Any) -> str:
    """The error of a fit."""
    try:
        trainer.fit(df)
    except sparkdl.SparkdlError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    from launch import ROOT, answer, session, spec

    listed = Path("nvidia-smi")
    listed.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1f2e3d4c)'\n")
    listed.chmod(0o755)
    os.environ["PATH"] = f"{Path.cwd()}{os.pathsep}{os.environ['PATH']}"
    settings = {
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(ROOT / "conf" / "discover_gpus.sh"),
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
        **spec()["settings"],
    }
    with session("local-cluster[2,2,1024]", **settings) as spark:
        generator, replicas, logged = np.random.default_rng(1), {}, []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())
        logging.getLogger("sparkdl").addHandler(handler)
        rows = [
            (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES)))
            for _ in range(48)
        ]
        df = spark.createDataFrame(rows, "features array<double>, label long")
        told = {engine: told_by(trainer_of(engine=engine), df) for engine in ("shuffle", "gang")}
        spark.sparkContext.environment["CUDA_VISIBLE_DEVICES"] = (
            ""  # from here on they are left alone
        )
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
                "logged": any("spark.default.parallelism=2000" in message for message in logged),
                "told": told,
            }
        )


if __name__ == "__main__":
    main()
