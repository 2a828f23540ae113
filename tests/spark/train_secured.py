"""Script: everything a run does, under Spark's security settings, and what listens meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import train_between_nodes
from pyspark import cloudpickle

import sparkdl


def trainer(df: Any, **changes: Any) -> sparkdl.Trainer:
    validation = sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(3))
    return train_between_nodes.trainer(
        "buffers", replicas=2, slices=2, validation=validation, **changes
    )


def outcome(trained: sparkdl.TrainedModel, df: Any) -> dict[str, Any]:
    """All that a run gives, as JSON values."""
    from launch import digest

    rows = trained.transform(df).orderBy("features").select("prediction").collect()
    return {
        "digest": digest(trained.module),
        "losses": trained.history.losses,
        "validations": trained.history.validations,
        "evaluated": trained.evaluate(df, metrics=["accuracy"]),
        "predictions": [list(row.prediction) for row in rows],
    }


def main() -> None:
    from launch import answer, session, spec
    from listening import watching

    given = spec()
    cloudpickle.register_pickle_by_value(train_between_nodes)  # not on the executors' path
    settings = {"spark.sparkdl.slab.dir": "slabs", "spark.sql.shuffle.partitions": "2"}
    settings |= given["settings"]
    with session("local-cluster[2,1,1024]", **settings) as spark:
        spark.sparkContext.parallelize(range(8), 8).count()  # until all executors are known
        df = train_between_nodes.frame(spark)
        kept = sparkdl.Checkpoint(given["checkpoints"], every=sparkdl.every(2))
        tokens: set[str] = set()

        class Note(sparkdl.Callback):
            """How many nodes there are: they send bytes to each other."""

            def on_iteration_end(self, trainer: Any, state: Any) -> None:
                tokens.add("bytes" if state.bytes_sent else "none")

        with watching() as found:
            trained = trainer(df, checkpoint=kept, callbacks=[Note()]).fit(df)
        result = outcome(trained, df)
        conf = spark.sparkContext.getConf()
        result |= {
            "settings": {key: conf.get(key) for key in given["settings"]},
            "sent": sorted(tokens),
            "roles": sorted(found.roles),
            "ports": sorted(found.ports),
            "sockets": sorted(found.sockets),
            "looks": found.looks,
            "slabs": [str(path) for path in Path("spark/work").glob("**/sparkdl-*")],
        }
    answer(result)


if __name__ == "__main__":
    main()
