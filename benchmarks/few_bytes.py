"""Measure what DiLoCo and gossip save and lose beside Synchronous by sending less.

    unshare --net bash -c 'ip link set lo up; exec .venv/bin/python benchmarks/few_bytes.py bytes'
    .venv/bin/python benchmarks/few_bytes.py text [--seeds 5]
    .venv/bin/python benchmarks/few_bytes.py digits [--seeds 5]

``bytes``: what the ranks of a gang send for a batch, counted by the loopback device, which nobody else
must use. A run of twice as many batches is beside one of the first length, so that beginning and end
cancel out. ``text``: the loss of a model of the next character, on lines of Python's own source that it
was not trained on. ``digits``: the accuracy on scikit-learn's handwritten digits. Both run in one
process, whose replicas have the bits of a gang's (DiLoCo: but for rounding); the learning rate of each
model is the best of a few for the first seed. None of these figures depends on the machine's load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import markdown, session
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import sparkdl

CONTEXT, CHARACTERS = 16, 96
HALF = {"wire": "bf16"}
SENDING: dict[str, tuple[Any, dict[str, Any]]] = {
    "Synchronous": (sparkdl.Synchronous(), {}),
    "Synchronous, bf16": (sparkdl.Synchronous(), HALF),
    "DiLoCo, H = 30": (sparkdl.DiLoCo(inner_steps=30), {}),
    "DiLoCo, H = 30, bf16": (sparkdl.DiLoCo(inner_steps=30), HALF),
    "Gossip, ring": (sparkdl.Gossip(topology="ring"), {}),
    "Gossip, exponential": (sparkdl.Gossip(topology="exponential"), {}),
    "Gossip, exponential, bf16": (sparkdl.Gossip(topology="exponential"), HALF),
}


def wide(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))


class NextCharacter(nn.Module):
    """A small network on the characters before."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, 16)
        self.layers = nn.Sequential(
            nn.Linear(16 * CONTEXT, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, CHARACTERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(self.characters(x).flatten(1))
        return found


def sent() -> int:
    """Return the bytes that the loopback device has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def count_bytes(spark: Any, replicas: int) -> dict[str, float]:
    """Return the bytes that a rank sends for a batch, by model."""
    pixels, labels = digits()[0]
    data = frame(spark, pixels.tolist(), labels.tolist(), "array<float>", replicas)
    found = {}
    for name, (model, changes) in SENDING.items():
        counts = []
        for batches in (30, 60):
            trainer = sparkdl.Trainer(
                model=partial(wide, 1 << 14),
                loss=nn.CrossEntropyLoss(),
                optimizer=partial(torch.optim.SGD, lr=0.01),
                batch_size=4 * replicas,
                replicas=replicas,
                engine="gang",
                consistency=model,
                stop=sparkdl.max_iteration(batches // model.inner_steps),
                **changes,
            )
            before = sent()
            trainer.fit(data)
            counts.append(sent() - before)
        found[name] = (counts[1] - counts[0]) / 30 / replicas
        print(name, f"{found[name]:,.0f} bytes a batch and rank", flush=True)
    return found


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    pixels, labels = load_digits(return_X_y=True)
    x, other_x, y, other_y = train_test_split(
        pixels.astype("float32") / 16, labels, test_size=0.2, random_state=0, stratify=labels
    )
    return (x, y), (other_x, other_y)


def text() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Every 20th line of a few modules of Python is for the test."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = ("argparse.py", "inspect.py", "typing.py", "turtle.py", "tarfile.py", "pathlib.py")
    lines = [line for name in names for line in (folder / name).read_text().splitlines() if line]
    found = []
    for chosen in (
        [line for n, line in enumerate(lines) if n % 20],
        lines[::20],
    ):
        codes = torch.tensor([min(max(ord(c) - 32, 0), 95) for c in "\n".join(chosen)])
        windows = codes.unfold(0, CONTEXT + 1, 7)
        found.append((windows[:, :CONTEXT].numpy(), windows[:, CONTEXT].numpy()))
    return found[0], found[1]


def frame(spark: Any, x: Any, y: Any, kind: str, replicas: int) -> Any:
    rows = spark.sparkContext.parallelize(list(zip(x, y, strict=True)), replicas)
    return spark.createDataFrame(rows, f"features {kind}, label bigint")


def evaluated(
    spark: Any, replicas: int, test: Any, data: Any, model: Any, changes: Mapping[str, Any]
) -> dict[str, float]:
    """Train, and return what ``test`` has of the result."""
    trainer = sparkdl.Trainer(
        loss=nn.CrossEntropyLoss(),
        replicas=replicas,
        engine="local",
        consistency=model,
        **changes,
    )
    trained = trainer.fit(data)
    outcome: dict[str, float] = trained.evaluate(test, metrics=["accuracy"])
    return outcome


def compared(
    run: Callable[[Any, float, int], float], rates: Mapping[str, Any], seeds: int, best: Any
) -> dict[str, list[float]]:
    """Return the figure of each model for each seed, at the model's best learning rate."""
    found = {}
    for name, (model, several) in rates.items():
        first = {rate: run(model, rate, 0) for rate in several}
        rate = best(first, key=first.__getitem__)
        found[name] = [first[rate], *(run(model, rate, seed) for seed in range(1, seeds))]
        print(name, first, found[name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["bytes", "text", "digits"])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--batches", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    replicas = arguments.replicas
    spark = session(f"local[{replicas}]")
    result: Any
    if arguments.what == "bytes":
        result = count_bytes(spark, replicas)
        base = result["Synchronous"]
        rows = [(name, value, base / value) for name, value in result.items()]
        print(markdown(["model", "bytes a batch and rank", "times fewer"], rows))
    else:
        texts = arguments.what == "text"
        training, other = text() if texts else digits()
        kind = "array<bigint>" if texts else "array<float>"
        data = frame(spark, training[0].tolist(), training[1].tolist(), kind, replicas).cache()
        test = frame(spark, other[0].tolist(), other[1].tolist(), kind, replicas).cache()

        def run(model: Any, rate: float, seed: int) -> float:
            changes: dict[str, Any] = {
                "model": NextCharacter,
                "optimizer": partial(torch.optim.AdamW, lr=rate),
                "batch_size": 32 * replicas,
                "stop": sparkdl.max_iteration(arguments.batches // model[0].inner_steps),
                "seed": seed,
                **model[1],
            }
            if not texts:
                changes |= {
                    "model": partial(wide, 64),
                    "optimizer": partial(torch.optim.SGD, lr=rate, momentum=0.9),
                    "batch_size": 8 * replicas,
                    "stop": sparkdl.max_epoch(arguments.epochs),
                }
            outcome = evaluated(spark, replicas, test, data, model[0], changes)
            return outcome["loss" if texts else "accuracy"]

        several = (2e-3, 4e-3) if texts else (0.03, 0.1, 0.3)
        names = [name for name in SENDING if not name.startswith("DiLoCo")]
        if texts:
            names = ["Synchronous", "DiLoCo, H = 30"]
        models = {name: (SENDING[name], several) for name in names}
        result = compared(run, models, arguments.seeds, min if texts else max)
        base = result["Synchronous"]
        rows = [
            (
                name,
                f"{statistics.mean(values):.4f}",
                f"{statistics.mean(values) - statistics.mean(base):+.4f}",
                f"{100 * (statistics.mean(values) / statistics.mean(base) - 1):+.2f} %",
            )
            for name, values in result.items()
        ]
        what = "loss" if texts else "accuracy"
        print(markdown(["model", what, "difference", "relative"], rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(result))
    spark.stop()


if __name__ == "__main__":
    main()
