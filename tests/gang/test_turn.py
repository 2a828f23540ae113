"""The ranks of a node build a model that is cut in turn."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gang_training import trainer_of, without_norm
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl.engines.gang.build_turn import Turn

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def noted(folder: Path) -> nn.Module:
    """It notes from when to when it is built, and by which process."""
    began = time.monotonic()
    module = without_norm()
    time.sleep(0.2)
    (folder / f"{began}").write_text(json.dumps([began, time.monotonic(), os.getpid()]))
    return module


@pytest.mark.parametrize(
    "strategy", ["fsdp", "tensor", sparkdl.Pipeline(micro_batches=1)], ids=lambda one: str(one)[:8]
)
def test_no_two_ranks_build_at_once(frames: Any, tmp_path: Path, strategy: Any) -> None:
    make = partial(noted, tmp_path)
    trained = trainer_of(model=make, strategy=strategy, stop=sparkdl.max_iteration(1)).fit(
        frames(8, 8)
    )
    assert len(trained.history.losses) == 1
    notes = sorted(json.loads(note.read_text()) for note in tmp_path.iterdir())
    builds = [note for note in notes if note[2] != os.getpid()]
    assert len({process for *_, process in builds}) == 2
    assert len(builds) == 4  # each to compare what it begins with, and to train; "tensor" too
    for one, next_one in itertools.pairwise(builds):
        assert one[1] <= next_one[0]


def test_a_turn_may_end_early(tmp_path):
    with Turn(tmp_path) as first:
        first.ends()
        with Turn(tmp_path):
            first.ends()
