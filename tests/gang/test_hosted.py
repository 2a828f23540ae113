"""Fewer task slots than ranks: a task hosts several of them, each a process; the bits are the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gang_training import CLASSES, WIDTH, same, trainer_of
from hosted import hosted_ranks
from mistakes import message_of
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl import ParameterError, TrainingError
from sparkdl.gang.driver import Gang
from sparkdl.gang.oversubscribe import Oversubscription

pytestmark = [
    pytest.mark.gang,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_left", "no_process_left"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
FOUR_ON_TWO = {"replicas": 4, "min_ranks": 2}


@pytest.fixture
def no_process_left() -> Any:
    yield
    assert hosted_ranks() == []


class Counts(sparkdl.Callback):
    """How many processes of ranks there are."""

    def on_fit_start(self, trainer: Any, state: Any) -> None:
        self.found: set[int] = set()

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        self.found.add(len(hosted_ranks()))


class Strikes(nn.Module):
    """In the third forward pass of rank 1 something happens, once. ``how``: an error of the model, the
    end of the rank's task, of the rank, or that too with all slabs of that name."""

    def __init__(self, how: str, folder: str) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(WIDTH, CLASSES), itertools.count(1).__next__
        self.how, self.folder = how, folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.passes() == 3 and self.training and os.environ.get("RANK") == "1":
            if self.how == "raise":
                raise RuntimeError("an operation of the user's")
            note = Path(self.folder, "struck")
            if not note.exists():
                note.touch()
                for root in Path("/dev/shm").glob(f"{self.how}-*"):
                    shutil.rmtree(root)
                os.kill(
                    os.getppid() if self.how == "kill the task" else os.getpid(), signal.SIGKILL
                )
        return self.layer(x)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["zero1", "ddp"])
def test_the_bits_are_those_of_as_many_ranks(frames, strategy, caplog):
    df, counts = frames(9, 12, 0, 11), Counts()
    run = trainer_of(
        **FOUR_ON_TWO,
        strategy=strategy,
        compression=sparkdl.TopK(0.5),  # sums have the order of the local engine
        validation=sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(3)),
    )
    with caplog.at_level("WARNING", logger="sparkdl"):
        trained = replace(run, callbacks=[counts]).fit(df)
    assert counts.found == {4}
    slices = 4 if strategy == "zero1" else 1
    here = {"engine": "local", "slices": slices, "min_ranks": None, "strategy": "ddp"}
    same(trained, replace(run, **here).fit(df))
    assert [r.getMessage() for r in caplog.records] == ["2 task slots now do the work of 4 ranks."]


@pytest.mark.soak
@pytest.mark.parametrize("how", ["kill", "kill the task", "delete the slabs"])
def test_a_lost_rank_costs_a_new_beginning(spark, frames, tmp_path, caplog, how):
    df, task, counts = frames(9, 12, 0, 11), how == "kill the task", Counts()
    if how == "delete the slabs":
        how = f"sparkdl-{spark.sparkContext.applicationId}"
    run = trainer_of(
        **FOUR_ON_TWO,
        model=partial(Strikes, how, str(tmp_path)),
        strategy="zero1",
        compression=sparkdl.TopK(0.5),
        validation=sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(3)),
    )
    with caplog.at_level("WARNING", logger="sparkdl"):
        trained = replace(run, callbacks=[counts]).fit(df)
    assert (tmp_path / "struck").exists()
    assert max(counts.found) == 4
    here = {"engine": "local", "slices": 4, "min_ranks": None, "strategy": "ddp"}
    same(trained, replace(run, **here).fit(df))
    (line,) = [r.getMessage() for r in caplog.records if "Continued from" in r.getMessage()]
    # Of two that go at once one may yet tell that the other's connections broke
    lost = r"ranks? [01] on \S+(, 1 on \S+)?" if task else r"rank 1 on \S+"
    assert re.fullmatch(
        rf"(iteration \d, epoch \d|setting up the ranks): {lost} went away \(the process died or "
        r"was killed, or its node is out of reach\)\. Continued from the beginning and repeated \d "
        r"iterations?: \d+\.\d s\. 2 task slots now do the work of 4 ranks\.",
        line,
    )


@pytest.mark.soak
def test_a_mistake_of_the_model_is_one_error_with_the_rank(frames, tmp_path):
    run = trainer_of(**FOUR_ON_TWO, model=partial(Strikes, "raise", str(tmp_path)))
    with pytest.raises(TrainingError) as caught:
        run.fit(frames(8, 8, 8, 8))
    assert re.match(
        r"iteration \d, epoch \d: rank 1 on \S+ failed\. RuntimeError: an operation of the user's\n",
        str(caught.value),
    )
    assert "test_hosted.py" in str(caught.value)


def test_fewer_slots_than_the_fewest(frames):
    assert message_of(
        ParameterError, trainer_of(replicas=4, min_ranks=3).fit, frames(8, 8, 8, 8)
    ) == (
        "a gang of 4 ranks with min_ranks=3 needs 3 task slots at once, and this session has 2: ask "
        "for more executors or cores."
    )


def test_samples_that_cannot_be_read_again_end_the_gang(spark):
    """Before its ranks start: as when a source has gone that lost samples came from."""

    def gone(records: Any) -> Any:
        raise ValueError("the source is gone")

    context = spark.sparkContext
    source = context.parallelize(range(3), 3).mapPartitions(gone)
    hosting = Oversubscription(2, lambda records: "", lambda: "")
    with contextlib.closing(Gang(context, source, "test", hosting=hosting)) as gang:
        assert re.match(
            r"the gang did not come together: (partition \d on \S+ failed \w+\. )?ValueError: "
            r"the source is gone\n",
            message_of(TrainingError, gang.start),
        )
