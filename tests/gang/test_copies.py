"""Four ranks, a model that is cut in several ways; then on with another strategy.

Of three models: one whose rows meet in a batch norm, one for pipelines, whose rows do not, and one of
layers that are cut. Torch sums the gradients of several ranks in an order of its own: bits may differ.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gang_training import CLASSES, WIDTH, alike, trainer_of
from launch import soak_but
from pyspark import cloudpickle
from strategy_models import Temper, paired
from torch import nn

import sparkdl

pytestmark = pytest.mark.gang
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
        nn.Linear(WIDTH, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Linear(16, CLASSES),
        Temper(),
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
        self.temper = Temper()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begun = x = self.into(x) + self.shift.sum(0)
        for block in self.blocks:
            x = x + block(x)
        return self.temper(self.out(x + begun))


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


def common(made: Any, rows: Any, **how: Any) -> sparkdl.Trainer:
    """A trainer that looks at an odd number of batches on the way, with a norm that is clipped, so that
    each copy's counts once."""
    every = sparkdl.every(3)
    validation = sparkdl.Validation(rows, metrics=["accuracy"], every=every, batch_size=7)
    seen = {"validation": validation, "histograms": sparkdl.every(1)}
    values = {"model": made, "replicas": RANKS, "batch_size": 12, "clip_norm": 0.3, "ema": 0.8}
    return trainer_of(**values, **seen, **how)


def sizes_for(made: Any) -> tuple[int, ...]:
    """Rows of the ranks: a batch norm needs some in each iteration."""
    return (15,) * RANKS if made is model else (25, 3, 20, 12)


def begun(name: str, parts: Any, path: Path) -> tuple[Any, sparkdl.TrainedModel]:
    """The rows, and what comes of the beginning; its checkpoints are in ``path``."""
    made, beginning, _ = BEGINNINGS[name]
    rows = parts(*sizes_for(made))
    kept = sparkdl.Checkpoint(path, every=sparkdl.every(3))
    return rows, common(made, rows, checkpoint=kept, **beginning).fit(rows)


def go_on(name: str, end: str, rows: Any, path: Path) -> None:
    """Resume with another strategy: the training of one process all the same."""
    made, _, ends = BEGINNINGS[name]
    ended = common(made, rows, stop=STOP, **ends[end]).fit(rows, resume=str(path))
    alike(ended, common(made, rows, engine="local", stop=STOP).fit(rows))


ALWAYS = [*("shards", "layers"), "shards whose copies share the update"]


@pytest.mark.parametrize("beginning", soak_but(ALWAYS, BEGINNINGS))
def test_copies_are_the_training_of_one_process(parts, tmp_path, beginning):
    """And the first of those that may goes on from its checkpoint."""
    made, _, ends = BEGINNINGS[beginning]
    rows, there = begun(beginning, parts, tmp_path)
    assert len(there.history) == BEGUN
    assert len(there.history.validations) == 2
    alike(there, common(made, rows, engine="local").fit(rows))
    go_on(beginning, next(iter(ends)), rows, tmp_path)


OTHERS = [(name, end) for name, (_, _, ends) in BEGINNINGS.items() for end in [*ends][1:]]


@pytest.mark.soak
@pytest.mark.parametrize(("beginning", "end"), OTHERS)
def test_others_go_on_from_its_checkpoint(parts, tmp_path, beginning, end):
    rows, _ = begun(beginning, parts, tmp_path)
    go_on(beginning, end, rows, tmp_path)


@pytest.mark.parametrize("beginning", soak_but(ALWAYS, SHARED))
def test_copies_that_share_the_update_do_half_of_it_each(parts, tmp_path, beginning):
    """Both ranks of a split model update the parameters that both have."""
    made, how, _ = BEGINNINGS[beginning]
    rows, optimizer = parts(*sizes_for(made)), partial(Noting, folder=str(tmp_path), lr=1e-2)
    common(made, rows, optimizer=optimizer, stop=sparkdl.max_iteration(1), **how).fit(rows)
    sizes = {name: p.numel() for name, p in made().named_parameters()}
    of_all = sum(sizes.values())
    if "layers" in beginning:
        of_all += sum(n for name, n in sizes.items() if name == "2.bias" or name[0] > "2")
    if "shards" in beginning:
        of_all += sizes["4.logit_scale"]
    assert sum(int((tmp_path / str(rank)).read_text()) for rank in range(RANKS)) == of_all
