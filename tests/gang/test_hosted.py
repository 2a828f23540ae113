"""Fewer task slots than ranks: a task hosts several of them, each a process; the bits are the same."""

from __future__ import annotations

import os
import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gang_training import CLASSES, WIDTH, same, trainer_of
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl import ParameterError, TrainingError
from sparkdl.gang.hosting import MODULE

pytestmark = [
    pytest.mark.gang,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_left", "no_process_left"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
FOUR_ON_TWO = {"replicas": 4, "min_ranks": 2}


def processes() -> list[int]:
    """Those of hosted ranks."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if MODULE.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def no_process_left() -> Any:
    yield
    assert processes() == []


class Strikes(nn.Module):
    """In the third forward pass of rank 1 something happens, once."""

    def __init__(self, how: str, folder: str) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, CLASSES), 0
        self.how, self.folder = how, folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.training and self.calls == 3 and os.environ.get("RANK") == "1":
            if self.how == "raise":
                raise RuntimeError("an operation of the user's")
            note = Path(self.folder, "struck")
            if not note.exists():
                note.touch()
                os.kill(os.getpid() if self.how == "kill" else os.getppid(), signal.SIGKILL)
        return self.layer(x)


@pytest.mark.parametrize("strategy", ["zero1", "ddp"])
def test_the_bits_are_those_of_as_many_ranks(frames, strategy, caplog):
    df = frames(9, 12, 0, 11)
    run = trainer_of(
        **FOUR_ON_TWO,
        strategy=strategy,
        compression=sparkdl.TopK(0.5),  # sums have the order of the local engine
        validation=sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(3)),
    )
    with caplog.at_level("WARNING", logger="sparkdl"):
        trained = run.fit(df)
    slices = 4 if strategy == "zero1" else 1
    here = {"engine": "local", "slices": slices, "min_ranks": None, "strategy": "ddp"}
    from dataclasses import replace

    same(trained, replace(run, **here).fit(df))
    assert [r.getMessage() for r in caplog.records] == [
        "2 task slots now do the work of 4 ranks."
    ]
