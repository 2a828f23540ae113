"""Two tasks with missing labels on hashed words, where the cases of one task are rare.

Messages to a help desk. Half of them have no label for one task or the other; urgent ones are rare, so
rows are drawn balanced. The words stay sparse from Spark's HashingTF to the model's table.
"""

from __future__ import annotations

from functools import partial

import torch
from pyspark.ml.feature import HashingTF
from pyspark.sql import DataFrame, SparkSession, functions
from torch import nn

import sparkdl

SIZE = 2**16
TASKS = ["urgent", "billing"]
COMMON = "please hello the my printer account screen about again since".split()


def messages(spark: SparkSession, rows: int = 2000) -> DataFrame:
    """features: a vector of SIZE; urgent, billing: 1, 0 or null; stratum: what is known of urgent."""
    common = f"array({', '.join(map(repr, COMMON))})"
    word = f"element_at({common}, 1 + int(pmod(hash(id, i), {len(COMMON)})))"
    data = spark.range(rows).selectExpr(
        "id",
        f"transform(sequence(1, 5), i -> {word}) AS common",
        "double(pmod(hash(id, 'u'), 20) = 0) AS urgent",
        "double(pmod(hash(id, 'b'), 3) = 0) AS billing",
    )
    data = data.selectExpr(
        "concat(common, array(IF(urgent = 1, 'now', 'later'), IF(billing = 1, 'invoice', 'manual'))) "
        "AS words",
        "IF(id % 4 = 0, NULL, urgent) AS urgent",
        "IF(id % 4 = 1, NULL, billing) AS billing",
    ).withColumn("stratum", functions.coalesce("urgent", functions.lit(-1)).cast("int"))
    hashing = HashingTF(numFeatures=SIZE, inputCol="words", outputCol="features")
    return hashing.transform(data)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(SIZE, len(TASKS), mode="sum")

    def forward(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self.table(indices, per_sample_weights=values)


def main(spark: SparkSession, epochs: int = 4) -> dict[str, float]:
    train, test = messages(spark).randomSplit([0.7, 0.3], seed=1)

    trainer = sparkdl.Trainer(
        model=Words,
        loss=sparkdl.MaskedLoss(nn.BCEWithLogitsLoss()),  # over the labels that are there
        optimizer=partial(torch.optim.Adam, lr=0.05),
        label=TASKS,
        columns={"features": sparkdl.Sparse(SIZE, form="indices")},
        sampling=sparkdl.Balanced("stratum"),
        batch_size=100,
        stop=sparkdl.max_epoch(epochs),
    )
    trained = trainer.fit(train)

    metrics = [
        sparkdl.MetricOf("auc", label=task, output=partial(torch.select, dim=1, index=place))
        for place, task in enumerate(TASKS)
    ]
    result = trained.evaluate(test, metrics=metrics)
    print(
        f"held-out messages: {', '.join(f'{name} {value:.3f}' for name, value in result.items())}"
    )
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
