"""Script: a gang over Spark Connect whose ranks are on two executors."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import connected_fits
import torch
import train_connected as cases
from launch import answer, spec
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from score_connected import connected

import sparkdl


def main() -> None:
    given = spec()
    folder = Path(given["place"])
    patient = {"spark.connect.execute.manager.detachedTimeout": "300s"}
    spark = connected("local-cluster[2,2,1024]", **patient)
    try:
        (folder / "slabs").mkdir()
        spark.conf.set("spark.sparkdl.slab.dir", str(folder / "slabs"))
        table = spark.read.parquet(given["data"])
        found = {
            "executors": len(set(sparkdl.gang.run(os.getppid, ranks=2, spark=spark))),
            "digests": {
                name: cases.digests(connected_fits.fits(table)[name].fit(table))
                for name in given["names"]
            },
            "interrupted": cases.interrupted(spark, folder, table),
            "orphan": cases.orphan(spark, folder / "orphan", given["data"], "5", slots=4),
        }
        profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
        threads = sparkdl.gang.run(torch.get_num_threads, spark=spark, resource_profile=profile)
        trainer = connected_fits.fits(table)["perceptron"]
        trained = replace(trainer, replicas=None, resource_profile=profile).fit(table)
        found["profile"] = {
            "threads": threads,
            "iterations": len(trained.history),
            "slots": cases.told(
                lambda: replace(trainer, replicas=3, resource_profile=profile).fit(table)
            ),
        }
        models = sparkdl.fit_groups(table, "kind", connected_fits.by_group())
        found["groups"] = connected_fits.of_groups(models)
    finally:
        spark.stop()
    answer(found)


if __name__ == "__main__":
    main()
