"""What compressed gradients cost in convergence, and what they save in bytes, on handwritten digits.

    .venv/bin/python -m benchmarks.compression --png compression.png

Two hidden layers on scikit-learn's 1,797 digits, a fifth of them held out; 4 replicas, batches of 64,
SGD with momentum, every row with the same settings. Bytes are those of the sections that one replica
sends in an iteration. Accuracy and loss are of the held-out digits, the mean over the seeds, and after
the last epoch the lowest and highest accuracy among them. The engine is "local": the bits are those of
"shuffle". The table is Markdown; ``--png`` draws all curves.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import sparkdl
from sparkdl.data.batches import BatchSpec
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.replica.iteration import IterationRows
from sparkdl.replica.step import (
    Gradients,
    ReplicaIteration,
    ReplicaResult,
    compress_outcome,
    section_maps,
    sections_nbytes,
)
from sparkdl.slices.spec import slice_specs

REPLICAS = 4
ROWS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"wire": "bf16"},
    "fp16": {"wire": "fp16"},
    "top-k 10 %": {"compression": sparkdl.TopK(0.1)},
    "top-k 1 %": {"compression": sparkdl.TopK(0.01)},
    "top-k 1 %, no error feedback": {"compression": sparkdl.TopK(0.01, error_feedback=False)},
    "PowerSGD rank 4": {"compression": sparkdl.PowerSGD(4)},
    "PowerSGD rank 2": {"compression": sparkdl.PowerSGD(2)},
    "PowerSGD rank 1": {"compression": sparkdl.PowerSGD(1)},
    "PowerSGD rank 1, no error feedback": {
        "compression": sparkdl.PowerSGD(1, error_feedback=False)
    },
    "PowerSGD rank 2, bf16": {"compression": sparkdl.PowerSGD(2), "wire": "bf16"},
}


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


@dataclass
class Curves:
    """By epoch: loss and accuracy on the held-out digits, one row a seed."""

    loss: np.ndarray
    accuracy: np.ndarray


def trainer_of(epochs: int, held_out: Any) -> sparkdl.Trainer:
    return sparkdl.Trainer(
        model=make_model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        batch_size=64,
        replicas=REPLICAS,
        engine="local",
        stop=sparkdl.max_epoch(epochs),
        validation=sparkdl.Validation(held_out, metrics=["accuracy"]),
    )


def curves_of(trainer: sparkdl.Trainer, data: Any, seeds: int) -> Curves:
    found = []
    for seed in range(seeds):
        validations = replace(trainer, seed=seed).fit(data).history.validations
        found.append([(v["metrics"]["loss"], v["metrics"]["accuracy"]) for v in validations])
    values = np.asarray(found)
    return Curves(values[:, :, 0], values[:, :, 1])


def bytes_sent(trainer: sparkdl.Trainer) -> int:
    """Of one replica in one iteration, to all slices."""
    recipe = Recipe(
        trainer.model,
        trainer.loss,
        trainer.optimizer,
        trainer.seed,
        trainer.policy,
        compression=trainer.compression,
    )
    live = LiveReplica.of(recipe)
    gradients = [torch.randn(parameter.shape) for _, parameter in live.flat.parameters]
    outcome = ReplicaResult(gradients=Gradients(list(gradients), {}))
    if trainer.compression is not None:
        work = ReplicaIteration(
            IterationRows(index=0, epoch=0, rows=()), 0, BatchSpec(num_features=1, num_labels=1), 1
        )
        outcome = compress_outcome(live, outcome, work, {})
    plans = slice_specs(live.flat.layout, REPLICAS, whole=trainer.compression is not None)
    return sum(sections_nbytes(live, plans, section_maps(live, plans, outcome)))


def draw(found: dict[str, Curves], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    shades = pyplot.get_cmap("tab20").colors
    for (name, curves), color in zip(found.items(), shades, strict=False):
        epochs = range(1, curves.loss.shape[1] + 1)
        dashes = "--" if "no error feedback" in name else "-"
        for axes, values in ((left, curves.loss), (right, 100 * curves.accuracy)):
            axes.plot(epochs, values.mean(0), dashes, color=color, label=name, linewidth=1.6)
    left.set(xlabel="epoch", ylabel="held-out loss", yscale="log")
    right.set(xlabel="epoch", ylabel="held-out accuracy, %", ylim=(80, 100))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    right.legend(fontsize=8)
    figure.suptitle(f"Digits, {REPLICAS} replicas: what gradients travel in")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--png", help="where to draw the curves")
    options = parser.parse_args()
    pixels, labels = load_digits(return_X_y=True)
    rows = [((x / 16).tolist(), int(y)) for x, y in zip(pixels, labels, strict=True)]
    spark = sparkdl.session("local[2]", **{"spark.sparkdl.progress": "false"})
    schema = "features array<float>, label long"
    data = spark.createDataFrame([row for i, row in enumerate(rows) if i % 5], schema).cache()
    held_out = spark.createDataFrame(rows[::5], schema).cache()
    plain, found = trainer_of(options.epochs, held_out), {}
    whole = bytes_sent(plain)
    print("| gradients travel as | bytes | share | accuracy % | lowest - highest | loss |")
    print("|---|---|---|---|---|---|")
    for name, changes in ROWS.items():
        trainer = replace(plain, **changes)
        curves = found[name] = curves_of(trainer, data, options.seeds)
        nbytes, last = bytes_sent(trainer), 100 * curves.accuracy[:, -1]
        print(
            f"| {name} | {nbytes:,} | {nbytes / whole:.1%} | {last.mean():.2f} | "
            f"{last.min():.2f} - {last.max():.2f} | {curves.loss[:, -1].mean():.4f} |",
            flush=True,
        )
    marks = sorted({1, 2, 5, 10, options.epochs} & set(range(1, options.epochs + 1)))
    print("\n| loss after epoch | " + " | ".join(map(str, marks)) + " |")
    print("|---" * (len(marks) + 1) + "|")
    for name, curves in found.items():
        print(
            f"| {name} | " + " | ".join(f"{curves.loss.mean(0)[m - 1]:.4f}" for m in marks) + " |"
        )
    if options.png:
        draw(found, options.png)
    spark.stop()


if __name__ == "__main__":
    main()
