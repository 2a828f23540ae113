"""Measure what DiLoCo and gossip save and lose beside Synchronous by sending less.

    unshare --net bash -c 'ip link set lo up; exec .venv/bin/python benchmarks/few_bytes.py bytes'
    .venv/bin/python benchmarks/few_bytes.py text [--seeds 5] [--json runs.json] [--plot bytes.svg]
    .venv/bin/python benchmarks/few_bytes.py digits [--seeds 5]

``bytes``: what the ranks of a gang send for a batch, counted by the loopback device, which nobody else
must use. A run of twice as many batches is beside one of the first length, so that beginning and end
cancel out. ``text``: the loss of a model of the next character, on lines of Python's own source that it
was not trained on; the learning rate falls to 0 along a cosine. ``digits``: the accuracy on
scikit-learn's handwritten digits. Both run in one process, whose replicas have the bits of a gang's
(DiLoCo: but for rounding); the learning rate of each model is the best of a few for the first seed.
None of these figures depends on the machine's load. Runs that the file of ``--json`` has are not
repeated. ``--plot`` draws the loss against the bytes that a rank has sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import time
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
LOOKS = 10
"""How often in a run the loss is looked at."""
Run = list[tuple[int, float]]
"""Batches, and the figure after them."""
SHORT_RUNS = partial(torch.optim.SGD, lr=1.0, momentum=0.5, nesterov=True)
"""An outer optimizer that forgets earlier rounds sooner than the default one."""
SENDING: dict[str, tuple[Any, dict[str, Any]]] = {
    "Synchronous": (sparkdl.Synchronous(), {}),
    "Synchronous, bf16": (sparkdl.Synchronous(), HALF),
    "DiLoCo, H = 30": (sparkdl.DiLoCo(inner_steps=30), {}),
    "DiLoCo, H = 30, outer momentum 0.5": (
        sparkdl.DiLoCo(inner_steps=30, outer_optimizer=SHORT_RUNS),
        {},
    ),
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
    for chosen in ([line for n, line in enumerate(lines) if n % 20], lines[::20]):
        codes = torch.tensor([min(max(ord(c) - 32, 0), 95) for c in "\n".join(chosen)])
        windows = codes.unfold(0, CONTEXT + 1, 7)
        found.append((windows[:, :CONTEXT].numpy(), windows[:, CONTEXT].numpy()))
    return found[0], found[1]


def frame(spark: Any, x: Any, y: Any, kind: str, replicas: int) -> Any:
    rows = spark.sparkContext.parallelize(list(zip(x, y, strict=True)), replicas)
    return spark.createDataFrame(rows, f"features {kind}, label bigint")


def models_sent(name: str, replicas: int) -> float:
    """Return what a rank sends for a batch, in models of float32; ``bytes`` measures the same."""
    model, changes = SENDING[name]
    whole = 2 * (replicas - 1) / replicas
    if isinstance(model, sparkdl.Gossip):
        whole = 2.0 if model.topology == "ring" else 1.0
    return whole / model.inner_steps / (2 if changes else 1)


def evaluated(data: Any, validation: Any, changes: Mapping[str, Any], figure: str) -> Run:
    """Train, and return a figure of the test data in the course of the run."""
    trainer = sparkdl.Trainer(
        loss=nn.CrossEntropyLoss(), engine="local", validation=validation, **changes
    )
    scores = trainer.fit(data).history.validations
    inner = trainer.consistency.inner_steps
    return [(score["iteration"] * inner, score["metrics"][figure]) for score in scores]


def compared(
    run: Callable[[str, float, int], Run],
    names: list[str],
    rates: tuple[float, ...],
    seeds: int,
    best: Any,
    length: str,
    path: Path | None,
) -> dict[str, list[Run]]:
    """Return the runs of each model for each seed, at the model's best learning rate."""
    known: dict[str, Run] = json.loads(path.read_text()) if path and path.exists() else {}

    def one(name: str, rate: float, seed: int) -> Run:
        key = f"{name}, {length}, rate {rate:g}, seed {seed}"
        if key not in known:
            begun = time.time()
            known[key] = run(name, rate, seed)
            print(f"{key}: {known[key][-1]} in {time.time() - begun:.0f} s", flush=True)
            if path:
                path.write_text(json.dumps(known))
        return known[key]

    chosen = {}
    for name in names:
        first = {rate: one(name, rate, 0)[-1][1] for rate in rates}
        chosen[name] = best(first, key=first.__getitem__)
        print(name, first, flush=True)
    found: dict[str, list[Run]] = {name: [] for name in names}
    for seed in range(seeds):
        for name in names:
            found[name].append(one(name, chosen[name], seed))
    return found


def draw(runs: Mapping[str, list[Run]], replicas: int, path: Path) -> None:
    """Draw the loss against the bytes that a rank has sent, the median of all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    megabytes = sum(p.numel() for p in NextCharacter().parameters()) * 4 / 1e6
    for name, several in runs.items():
        points = list(zip(*several, strict=True))
        sent = [point[0][0] * models_sent(name, replicas) * megabytes for point in points]
        losses = [statistics.median(loss for _, loss in point) for point in points]
        axes.plot(sent, losses, marker=".", label=name)
        last, place = f"{losses[-1]:.3f}", {"textcoords": "offset points", "va": "center"}
        axes.annotate(last, (sent[-1], losses[-1]), (6, 0), **place)
    axes.set(
        xscale="log",
        xlabel="megabytes that a rank has sent",
        ylabel="loss on lines that were not trained on",
        title=f"{replicas} replicas, a model of {1000 * megabytes:.0f} kB, as many batches for each",
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.1, y=0.1)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["bytes", "text", "digits"])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--batches", type=int, default=2400, help="at least 300")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--models",
        default="Synchronous; DiLoCo, H = 30; DiLoCo, H = 30, outer momentum 0.5",
        help="for text; ; between",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="where to draw loss against bytes, for text")
    arguments = parser.parse_args()
    replicas = arguments.replicas
    spark = session(f"local[{replicas}]")
    if arguments.what == "bytes":
        result = count_bytes(spark, replicas)
        base = result["Synchronous"]
        rows = [(name, value, base / value) for name, value in result.items()]
        print(markdown(["model", "bytes a batch and rank", "times fewer"], rows))
        if arguments.json:
            arguments.json.write_text(json.dumps(result))
    else:
        texts = arguments.what == "text"
        training, other = text() if texts else digits()
        kind = "array<bigint>" if texts else "array<float>"
        data = frame(spark, training[0].tolist(), training[1].tolist(), kind, replicas).cache()
        test = frame(spark, other[0].tolist(), other[1].tolist(), kind, replicas).cache()

        def run(name: str, rate: float, seed: int) -> Run:
            model, several = SENDING[name]
            rounds = arguments.batches // model.inner_steps // LOOKS * LOOKS
            changes: dict[str, Any] = {
                "model": NextCharacter,
                "optimizer": partial(torch.optim.AdamW, lr=rate),
                "schedule": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=rounds),
                "batch_size": 32 * replicas,
                "stop": sparkdl.max_iteration(rounds),
                "consistency": model,
                "replicas": replicas,
                "seed": seed,
                **several,
            }
            if not texts:
                changes |= {
                    "model": partial(wide, 64),
                    "optimizer": partial(torch.optim.SGD, lr=rate, momentum=0.9),
                    "schedule": None,
                    "batch_size": 8 * replicas,
                    "stop": sparkdl.max_epoch(arguments.epochs),
                }
            every = sparkdl.several_iterations(rounds // LOOKS) if texts else sparkdl.every_epoch()
            validation = sparkdl.Validation(test, metrics=["accuracy"], every=every)
            return evaluated(data, validation, changes, "loss" if texts else "accuracy")

        names = [name for name in SENDING if not name.startswith("DiLoCo")]
        if texts:
            names = arguments.models.split("; ")
        rates, best = ((4e-3, 8e-3), min) if texts else ((0.03, 0.1, 0.3), max)
        length = f"{arguments.batches} batches" if texts else f"{arguments.epochs} epochs"
        runs = compared(run, names, rates, arguments.seeds, best, length, arguments.json)
        figures = {name: [its[-1][1] for its in several] for name, several in runs.items()}
        base = figures[names[0]]
        rows = [
            (
                name,
                f"{statistics.median(values):.4f}",
                f"{statistics.median(values) - statistics.median(base):+.4f}",
                ", ".join(f"{100 * (a / b - 1):+.2f}" for a, b in zip(values, base, strict=True)),
            )
            for name, values in figures.items()
        ]
        what = "loss" if texts else "accuracy"
        print(markdown(["model", what, "difference", "percent more, each seed"], rows))
        if arguments.plot:
            draw(runs, replicas, arguments.plot)
    spark.stop()


if __name__ == "__main__":
    main()
