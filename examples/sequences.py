"""Sequences of varying length: padded in each mini-batch, and drawn beside others of like length.

Strings of the Reber grammar (Reber, "Implicit learning of artificial grammars", 1967), half of them
with one wrong letter: which half is a string of?
"""

from __future__ import annotations

import random
from functools import partial

import torch
from pyspark.sql import DataFrame, SparkSession
from torch import nn

import sparkdl

LETTERS = "BTSXPVE"
GRAMMAR = ["T1P2", "S1X3", "T2V4", "X2S5", "P3V5"]
"""For each state two letters, each with the state it leads to."""


def reber(draw: random.Random, right: bool) -> str:
    """A string of the grammar, or one that another letter in its middle has spoiled."""
    text, state = "B", 0
    while state < 5:
        way = draw.choice([0, 2])
        text, state = text + GRAMMAR[state][way], int(GRAMMAR[state][way + 1])
    if right:
        return f"{text}E"
    place = draw.randrange(1, len(text))
    wrong = draw.choice([c for c in "TSXPV" if c not in text[place - 1 : place + 1]])
    return f"{text[:place]}{wrong}{text[place + 1 :]}E"


def string_frame(spark: SparkSession, count: int = 3000) -> DataFrame:
    """letters array<int> from 1 to 7, of any length from 5 on; label float."""
    draw = random.Random(1)
    rows = [(reber(draw, i % 2 == 1), i % 2) for i in range(count)]
    return spark.createDataFrame(rows, "text string, label int").selectExpr(
        f"transform(split(text, ''), letter -> locate(letter, '{LETTERS}')) AS letters",
        "float(label) AS label",
    )


class Reader(nn.Module):
    """One logit a string, positive for right."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(1 + len(LETTERS), 8, padding_idx=0)
        self.gru = nn.GRU(8, 32, batch_first=True)
        self.score = nn.Linear(32, 1)

    def forward(self, letters: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.letters(letters))  # (B, T, 32), the padded ones too
        last = states[torch.arange(len(lengths)), lengths - 1]
        return self.score(last).squeeze(1)


def main(spark: SparkSession, epochs: int = 4) -> dict[str, float]:
    train, test = string_frame(spark).randomSplit([0.8, 0.2], seed=1)

    trainer = sparkdl.Trainer(
        model=Reader,
        loss=nn.BCEWithLogitsLoss(),
        optimizer=partial(torch.optim.Adam, lr=2e-2),
        features="letters",
        columns={"letters": sparkdl.Sequence(lengths=True)},  # the model gets the lengths too
        bucketing=512,
        batch_size=128,
        stop=sparkdl.max_epoch(epochs),
    )
    result = trainer.fit(train).evaluate(test, metrics=["accuracy"])
    print(f"{test.count()} held-out strings: accuracy {result['accuracy']:.3f}")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
