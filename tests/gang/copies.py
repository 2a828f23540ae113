"""Four ranks, a model that is cut in several ways; then on with another strategy.

Of three models: one whose rows meet in a batch norm, one for pipelines, whose rows do not, and one of
layers that are cut.
"""

from __future__ import annotations

import itertools
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gang_training import CLASSES, WIDTH, trainer_of
from pyspark import cloudpickle
from torch import nn

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RANKS, BEGUN, STOP = 4, 6, sparkdl.max_iteration(9)
ENDS: dict[str, dict] = {
    "local": {"engine": "local"},
    "zero1": {"strategy": "zero1"},
    "one copy": {"strategy": "fsdp"},
    "two copies": {"mesh": {"data": 2, "shard": 2}},
}
PIPELINES: dict[str, dict] = {
    "one pipeline": {"strategy": "pipeline"},
    "two pipelines": {"mesh": {"data": 2, "pipe": 2}},
    "two that share the update": {"strategy": "zero1", "mesh": {"data": 2, "pipe": 2}},
}


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


def paired() -> nn.Module:
    """Two layers that are cut, and others; an output of fewer rows than ranks."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 7), nn.LayerNorm(7), nn.Linear(7, CLASSES)
    )


def rowwise() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, CLASSES)
    )


class Own(nn.Module):
    """A forward of its own; a parameter that is no layer's; layers that are cut in one of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4, 16))
        self.into, self.out = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begun = x = self.into(x) + self.shift.sum(0)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x + begun)


LAYERS: dict[str, dict] = {
    "four parts": {"strategy": "tensor"},
    "parts and copies": {"mesh": {"data": 2, "tensor": 2}},
    "parts and shards": {"mesh": {"shard": 2, "tensor": 2}},
    "parts and copies that share the update": {
        "strategy": ["tensor", "zero1"],
        "mesh": {"data": 2, "tensor": 2},
    },
}
STAGES_OF_LAYERS, STAGES_OF_SHARDS = {"pipe": 2, "tensor": 2}, {"pipe": 2, "shard": 2}
BEGINNINGS: dict[str, tuple[Any, dict, dict[str, dict]]] = {
    "shards": (
        model,
        {"strategy": sparkdl.FSDP(units=["0"]), "mesh": {"data": 2, "shard": 2}},
        ENDS,
    ),
    "pipelines": (rowwise, {"mesh": {"data": 2, "pipe": 2}}, ENDS | PIPELINES),
    "pipelines that share the update": (
        rowwise,
        PIPELINES["two that share the update"],
        {"local": ENDS["local"], "two pipelines": PIPELINES["two pipelines"]},
    ),
    "interleaved": (
        rowwise,
        {"strategy": sparkdl.Pipeline(stages_per_rank=2), "mesh": {"pipe": 2}},
        PIPELINES,
    ),
    "layers": (paired, {"mesh": {"data": 2, "tensor": 2}}, ENDS | LAYERS),
    "layers whose copies share the update": (
        paired,
        LAYERS["parts and copies that share the update"],
        {"local": ENDS["local"], "parts and copies": LAYERS["parts and copies"]},
    ),
    "shards whose copies share the update": (
        model,
        {"strategy": ["zero1", sparkdl.FSDP(units=["0"])], "mesh": {"data": 2, "shard": 2}},
        ENDS,
    ),
    "shards of layers": (
        paired,
        {"strategy": [sparkdl.FSDP(units=["0", "2"]), "tensor"], "mesh": {"shard": 2, "tensor": 2}},
        ENDS | LAYERS,
    ),
    "stages of layers": (
        paired,
        {"strategy": [sparkdl.Pipeline(stages_per_rank=2), "tensor"], "mesh": STAGES_OF_LAYERS},
        {"local": ENDS["local"], "shards of stages": {"mesh": STAGES_OF_SHARDS}},
    ),
    "stages of shards": (
        paired,
        {"strategy": ["pipeline", sparkdl.FSDP(units=["2"])], "mesh": STAGES_OF_SHARDS},
        {"zero1": ENDS["zero1"], "stages of layers": {"mesh": STAGES_OF_LAYERS}},
    ),
    "stages of a forward": (
        Own,
        {"strategy": ["pipeline", sparkdl.FSDP(units=["blocks.*"])], "mesh": STAGES_OF_SHARDS},
        {"zero1": ENDS["zero1"], "stages of layers": {"mesh": STAGES_OF_LAYERS}},
    ),
}
"""A model, how its training begins, and how it goes on."""
SHARED = [name for name in BEGINNINGS if "share the update" in name]


class Noting(torch.optim.Adam):
    """Each rank leaves a file: how many elements it updates."""

    def __init__(self, parameters: Any, folder: str, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.folder = folder

    def step(self, closure: Any = None) -> Any:
        if "RANK" in os.environ:
            note = Path(self.folder, os.environ["RANK"])
            note.write_text(str(sum(p.numel() for g in self.param_groups for p in g["params"])))
        return super().step(closure)


def updated(common: Any, how: dict, df: Any, folder: Path) -> list[int]:
    """How many elements each rank updates."""
    folder.mkdir(parents=True)
    optimizer = partial(Noting, folder=str(folder), lr=1e-2)
    common(**how, optimizer=optimizer, stop=sparkdl.max_iteration(1)).fit(df)
    return [int((folder / str(rank)).read_text()) for rank in range(RANKS)]


def run(spark: Any, runs: dict[str, list[str]], path: str) -> dict[str, Any]:
    """``runs``: by beginning, how it goes on. ``path``: of checkpoints and notes."""
    generator = np.random.default_rng(1)
    rows = [
        (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES))) for _ in range(60)
    ]
    even, uneven = (
        spark.createDataFrame(
            spark.sparkContext.parallelize(
                [rows[a:b] for a, b in itertools.pairwise(cuts)], RANKS
            ).flatMap(list),
            "features array<double>, label long",
        ).cache()
        for cuts in ((0, 15, 30, 45, 60), (0, 25, 28, 48, 60))
    )
    found = {}
    for name, wanted in runs.items():
        made, beginning, ends = BEGINNINGS[name]
        kept = f"{path}/{name}"
        df = even if made is model else uneven
        common = partial(
            trainer_of, model=made, replicas=RANKS, batch_size=12, clip_norm=0.3, ema=0.8
        )
        begun = common(
            **beginning,
            checkpoint=sparkdl.Checkpoint(kept, every=sparkdl.every(3)),
            **seen(df),
        )
        whole = common(engine="local", stop=STOP, **seen(df))
        some = {"whole": told(whole.fit(df)), "begun": told(begun.fit(df))}
        for end in wanted:
            some[end] = told(common(stop=STOP, **ends[end]).fit(df, resume=kept))
        if name in SHARED:
            notes = Path(path, "notes", name)
            some["updated"] = updated(common, beginning, df, notes)
        found[name] = some
    return found


def seen(df: Any) -> dict[str, Any]:
    """What is looked at on the way, of an odd number of batches."""
    validation = sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(3), batch_size=7)
    return {"validation": validation, "histograms": sparkdl.every(1)}


def told(trained: sparkdl.TrainedModel) -> dict:
    models = [trained.module, trained.ema.module if trained.ema else None]
    weights = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models if m]
    validated = [list(one["metrics"].values()) for one in trained.history.validations]
    return {
        "losses": trained.history.losses,
        "weights": torch.cat(weights).tolist(),
        "validated": validated,
    }
