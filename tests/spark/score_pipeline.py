"""Load saved pipelines in a process that knows nothing of their training, and score with them."""

from __future__ import annotations

import json
import sys
from typing import Any

from made_by_name import perceptron
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.tuning import CrossValidatorModel

import sparkdl
import sparkdl.ml


def said(work: Any) -> str:
    """Return the message of the error that ``work`` raises."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(folder: str) -> None:
    session = sparkdl.session(
        "local[1]",
        **{
            "spark.ui.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
        },
    )
    rows = session.read.parquet(f"{folder}/rows")
    scored = PipelineModel.load(f"{folder}/pipeline").transform(rows)
    grid = CrossValidatorModel.load(f"{folder}/validated")
    told = {
        "predictions": [row.prediction for row in scored.orderBy("id").collect()],
        "names": [row.guess for row in scored.orderBy("id").collect()],
        "metrics": grid.avgMetrics,
        "rates": [next(iter(point.values())) for point in grid.getEstimatorParamMaps()],
        "untrained": said(lambda: Pipeline.load(f"{folder}/untrained")),
    }
    program = PipelineModel.load(f"{folder}/pickled").transform(rows)
    told["without_code"] = [row.prediction for row in program.orderBy("id").collect()]
    with sparkdl.ml.loading(model=perceptron):
        again = PipelineModel.load(f"{folder}/pickled").transform(rows)
        told["given"] = [row.prediction for row in again.orderBy("id").collect()]
    print(json.dumps(told))
    session.stop()


if __name__ == "__main__":
    main(sys.argv[1])
