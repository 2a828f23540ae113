"""Script: a gang over Spark Connect whose ranks are on two executors."""

from __future__ import annotations

import os
from pathlib import Path

import connected_fits
import train_connected as cases
from launch import answer, spec
from score_connected import connected

import sparkdl


def main() -> None:
    given = spec()
    folder = Path(given["place"])
    spark = connected("local-cluster[2,1,1024]")
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
        }
        models = sparkdl.fit_groups(table, "kind", connected_fits.by_group())
        found["groups"] = connected_fits.of_groups(models)
    finally:
        spark.stop()
    answer(found)


if __name__ == "__main__":
    main()
