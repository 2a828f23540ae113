"""Scoring with a model that was never trained here: digits, from a file.

A file of TorchScript, as a colleague may hand it over, is scored by ``sparkdl.predict``, with two
outputs a row; bad rows get a reason in place of predictions, and the result lies in files with which
a killed job goes on. The same model is a function of SQL, too. The data: 1,797 handwritten digits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

import sparkdl


class Digits(nn.Module):
    """The linear model that scikit-learn found, in torch."""

    def __init__(self, found: LogisticRegression) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.linear.weight.data = torch.tensor(found.coef_, dtype=torch.float32)
        self.linear.bias.data = torch.tensor(found.intercept_, dtype=torch.float32)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chances = torch.softmax(self.linear(pixels), 1)
        return chances.argmax(1), chances.amax(1)


def main(spark: SparkSession) -> dict[str, float]:
    pixels, labels = load_digits(return_X_y=True)
    model = LogisticRegression(max_iter=200).fit(pixels / 16, labels)
    folder = Path(tempfile.mkdtemp())
    torch.jit.script(Digits(model)).save(folder / "digits.pt")

    rows = [(n, row.tolist()) for n, row in enumerate(pixels / 16)]
    digits = spark.createDataFrame([*rows, (-1, None)], "number int, pixels array<double>")
    scored = sparkdl.predict(
        digits,
        folder / "digits.pt",
        "pixels",
        outputs={"digit": 0, "chance": 1},
        handle_invalid="keep",
        path=folder / "scored",
        partitions=2,
    )
    for row in scored.where("error IS NOT NULL").collect():
        print(f"row {row.number}: {row.error}")

    expected = model.predict(pixels / 16)
    found = scored.where("error IS NULL").select("number", "digit").collect()
    agreement = sum(row.digit == expected[row.number] for row in found) / len(expected)
    print(f"{len(found)} digits: agreement with scikit-learn {agreement:.3f}")

    sparkdl.register_function("digit", folder / "digits.pt", digits.limit(9), "pixels")
    digits.where("number >= 0").createOrReplaceTempView("digits")
    spark.sql(
        "SELECT p.prediction_0 AS digit, count(*) AS rows, round(avg(p.prediction_1), 3) AS chance "
        "FROM (SELECT digit(pixels) AS p FROM digits) GROUP BY 1 ORDER BY 1"
    ).show(3)
    return {"agreement": agreement}


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
