"""Script: what a session of Spark Connect does with saved models, and how it trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import sparkdl
from sparkdl.infer.forward import ShippedModule
from sparkdl.settings import SPARK_SETTINGS

FORGETFUL = {
    "spark.connect.execute.manager.detachedTimeout": "4s",
    "spark.connect.execute.manager.maintenanceInterval": "1s",
    "spark.connect.execute.reattachable.senderMaxStreamDuration": "4s",
    "spark.connect.progress.reportInterval": "200ms",
}
"""Settings with which the query of a client that went away ends soon, and reports come soon."""


def connected(master: str = "local[2]", **settings: str) -> Any:
    """Start a server in a JVM of its own, and return its client's session."""
    from launch import QUIET
    from pyspark.sql import SparkSession

    os.environ["SPARK_TESTING"] = "1"  # any free port
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    builder = SparkSession.builder.remote(master)
    quick = {key: value for key, (value, _) in SPARK_SETTINGS.items()}
    for key, value in {**quick, **QUIET, **FORGETFUL, **settings}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def main() -> None:
    import train_connected as cases
    from launch import answer, spec

    given = spec()
    spark = connected()
    try:
        # Numbered: an order that the predictions can be compared in.
        rows = [(number, *row) for number, row in enumerate(given["rows"])]
        data = spark.createDataFrame(rows, "number long, x array<float>, y float").repartition(2)
        result: dict[str, Any] = {"session": type(spark).__module__}
        for name, path in given["models"].items():
            model = sparkdl.load(path, trust=True)
            scored = model.transform(data).orderBy("number").collect()
            result[name] = {
                "predictions": [row.prediction for row in scored],
                "apart": type(ShippedModule.before(model.module).apart).__name__,
                "again": model.transform(data.where("number < 3")).count(),
                "evaluated": model.evaluate(data, metrics=["mse"]),
            }
        module = model.module
        scored = sparkdl.predict(data, module, "x", handle_invalid="keep").orderBy("number")
        result["any model"] = [(row.prediction, row.error) for row in scored.collect()]
        written = sparkdl.predict(data, module, "x", path=given["written"], partitions=2)
        result["written"] = [row.prediction for row in written.orderBy("number").collect()]
        sparkdl.register_function("score", module, data, "x")
        data.createOrReplaceTempView("data")
        found = spark.sql("SELECT score(x) AS prediction FROM data ORDER BY number").collect()
        result["function"] = [row.prediction for row in found]
        result["sends"] = cases.sends(spark, data, model)
        folder, table = Path(given["place"]), spark.read.parquet(given["data"])
        (folder / "slabs").mkdir()
        spark.conf.set("spark.sparkdl.slab.dir", str(folder / "slabs"))
        result["training"] = cases.training(
            folder, table, given["names"], given["mistakes"], given["kills"]
        )
        for part in given["parts"]:
            result[part] = cases.PARTS[part](spark, folder, table, given)
        result["stopped"] = cases.stopped(spark, table)
    finally:
        spark.stop()
    answer(result)


if __name__ == "__main__":
    main()
