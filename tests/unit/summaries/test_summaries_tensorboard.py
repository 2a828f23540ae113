"""TensorBoard's event files, read back."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import summary_runs as runs
import torch
from fork_server import run_fresh
from permissions import open_to_all, unprivileged

import sparkdl
from sparkdl.loop.state import TrainState
from sparkdl.slices.update import Histogram
from sparkdl.summaries import TensorBoard

pytest.importorskip("tensorboard")


def test_a_histogram(tmp_path: Path) -> None:
    runs.play([TensorBoard(tmp_path)], runs.states())
    value = runs.tensorboard_events(tmp_path).Histograms("weights/weight")[0].histogram_value
    assert (value.min, value.max, value.num, value.sum) == (-1.0, 6.0, 5, 6.0)
    assert value.sum_squares == 1 + 0 + 0.25 + 0.25 + 36
    counts, limits = np.array(value.bucket), np.array(value.bucket_limit)
    assert (counts[0] > 0, counts[-1] > 0, counts.sum()) == (True, True, 5)
    assert (np.diff(limits) > 0).all()
    for number, count in ((-1.0, 1), (0.0, 1), (0.5, 2), (6.0, 1)):
        bucket = np.searchsorted(limits, number, side="right")
        assert counts[bucket] == count


@pytest.mark.parametrize(
    ("values", "shown"), [([1e30, -1e30], True), ([math.nan, math.inf], False), ([0.0], True)]
)
def test_histograms_at_the_edges(tmp_path: Path, values: list[float], shown: bool) -> None:
    histograms = {"gradients/x": Histogram.of(torch.tensor(values))}
    state = TrainState(iteration=1, samples=2, loss=1.0, seconds=1.0, histograms=histograms)
    runs.play([TensorBoard(tmp_path)], [TrainState(), state])
    found = runs.tensorboard_events(tmp_path)
    assert found.Tags()["histograms"] == (["gradients/x"] if shown else [])
    if shown:
        value = found.Histograms("gradients/x")[0].histogram_value
        assert np.isfinite(value.bucket_limit).all()
        assert sum(value.bucket) == len(values)


@pytest.mark.parametrize("first", [1, 6])
def test_a_run_hides_what_it_does_again(tmp_path: Path, first: int) -> None:
    """Resumed, or begun anew, as where no checkpoint had been complete."""
    callback = TensorBoard(tmp_path)
    runs.play([callback], runs.states(last=7), finish=False)
    time.sleep(1.1)  # TensorBoard takes the files in the order of their seconds
    runs.play([TensorBoard(tmp_path)], runs.states(first=first))
    del callback
    found = runs.tensorboard_events(tmp_path).Scalars("loss")
    assert [event.step for event in found] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_folder_that_cannot_be_written_is_told_as_the_fit_starts() -> None:
    with open_to_all() as folder:
        (folder / "file").touch()
        (folder / "closed").mkdir(mode=0o555)
        for path, reason in (
            (folder / "file", f"File exists: {folder / 'file'}"),
            (folder / "file" / "deep", f"Not a directory: {folder / 'file' / 'deep'}"),
            (folder / "closed", "Permission denied: "),
        ):
            callback = TensorBoard(path)
            with unprivileged(), pytest.raises(sparkdl.ParameterError) as caught:
                runs.play([callback], runs.states(last=0), finish=False)
            assert str(caught.value).startswith(
                f'TensorBoard("{path}"): no file can be written there ({reason}'
            )
            assert str(caught.value).endswith("Give a path in a folder that you may write to.")


PROGRAM = """
import sys
import sparkdl
heavy = {"sparkdl.summaries", "mlflow", "tensorboard", "matplotlib", "torch.utils.tensorboard"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import sparkdl.summaries
assert not (heavy - {"sparkdl.summaries"}) & set(sys.modules)
import summary_runs
callback = sparkdl.summaries.TensorBoard(sys.argv[1])
summary_runs.play([callback], summary_runs.states(last=6), finish=False)
"""


def test_a_program_imports_it_late_sees_no_warning_and_loses_nothing(tmp_path: Path) -> None:
    """The program ends without the end of its fit."""
    done = run_fresh(PROGRAM, str(tmp_path), cwd=Path(__file__).parents[1])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(runs.tensorboard_scalars(tmp_path)["loss"]) == [1, 2, 3, 4, 5, 6]
