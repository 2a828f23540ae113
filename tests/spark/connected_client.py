"""Script: a client of a server of Spark Connect that trains until it is killed."""

from __future__ import annotations

import sys
from dataclasses import replace

import connected_fits
from pyspark.sql import SparkSession

import sparkdl


def main() -> None:
    url, data, folder, seconds = sys.argv[1:]
    spark = SparkSession.builder.remote(url).getOrCreate()
    spark.conf.set("spark.sparkdl.client.seconds", seconds)
    table = spark.read.parquet(data)
    trainer = replace(
        connected_fits.fits(table)["perceptron"],
        stop=sparkdl.max_epoch(100_000),
        checkpoint=sparkdl.Checkpoint(folder),
        callbacks=[connected_fits.Sleep()],
    )
    trainer.fit(table)


if __name__ == "__main__":
    main()
