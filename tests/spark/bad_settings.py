"""Mistakes in the parameters of a trainer, and in paths."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bad_inputs import Fit, Mistake, data_error, locked, parameter_error
from pyspark import cloudpickle
from pyspark.sql import functions
from torch import nn

import sparkdl
from sparkdl import CheckpointError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PARAMETERS = [
    parameter_error(
        "label as a Column",
        lambda fit: fit(fit.good(), label=functions.col("label")),
        "label=Column<'label'>: give a column name, or a list of names.",
    ),
    parameter_error(
        "features as a Column",
        lambda fit: fit(fit.good(), features=functions.col("n")),
        "features=Column<'n'>: give a column name, or a list of names.",
    ),
    parameter_error(
        "weight as a Column",
        lambda fit: fit(fit.good(), weight=functions.col("n")),
        "weight is a Column: give the name of a column.",
    ),
    parameter_error(
        "metric with a lock",
        lambda fit: fit(fit.good(), validation=sparkdl.Validation(fit.good(), [locked()])),
        'metric "gap" cannot be pickled, so it cannot travel to the executors (TypeError: cannot '
        "pickle '_thread.lock' object). Use a function or class of an importable module, with no "
        "open resource in it.",
    ),
    data_error(
        "validation on a list",
        lambda fit: fit(fit.good(), validation=sparkdl.Validation([1.0])),
        "validation data: fit takes a DataFrame or an RDD, not builtins.list. Make one with "
        "spark.createDataFrame(rows, schema) or spark.sparkContext.parallelize(samples).",
    ),
    data_error(
        "fit on a path",
        lambda fit: fit("data.parquet"),
        "fit takes a DataFrame or an RDD, not builtins.str. Make one with "
        "spark.createDataFrame(rows, schema) or spark.sparkContext.parallelize(samples).",
    ),
    parameter_error(
        "start that is a module",
        lambda fit: fit(fit.good(), start=nn.Linear(2, 1)),
        "start is a Linear: give what fit returned, or sparkdl.load(path). A state_dict or a "
        "file is weights= of the trainer.",
    ),
    parameter_error(
        "resume by number",
        lambda fit: fit(fit.good(), resume=5),
        'resume is an int: give "latest", or the path of a checkpoint or of a folder of them.',
    ),
]
"""Those that a fit finds out; those of a trainer are in unit/train/test_policy_checks.py."""


def file(fit: Fit) -> Path:
    """A file that is nothing else."""
    path = fit.tmp / "file"
    path.write_text("x")
    return path


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Flatten(0))


def flip(file: Path) -> None:
    """Change a bit of a file's last byte."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


PATHS = [
    Mistake(
        "checkpoints in a file",
        lambda fit: fit(fit.good(), checkpoint=sparkdl.Checkpoint(file(fit))),
        CheckpointError,
        "cannot make the folder {tmp}/file: File exists. Give Checkpoint(path) a folder that "
        "can be written, on a file system that the driver and all executors share.",
    ),
    Mistake(
        "checkpoints where nobody may write",
        lambda fit: fit(fit.good(), checkpoint=sparkdl.Checkpoint("/proc/run")),
        CheckpointError,
        "cannot make the folder /proc/run: No such file or directory. Give Checkpoint(path) "
        "a folder that can be written, on a file system that the driver and all executors "
        "share.",
    ),
    Mistake(
        "checkpoints of an unknown scheme",
        lambda fit: fit(fit.good(), checkpoint=sparkdl.Checkpoint("s4://bucket/run")),
        CheckpointError,
        "cannot make the folder s4://bucket/run: Protocol not known: s4. Give "
        "Checkpoint(path) a folder that can be written, on a file system that the driver and "
        "all executors share.",
    ),
    parameter_error(
        "latest of nothing",
        lambda fit: fit(fit.good(), resume="latest"),
        'resume="latest" means the latest checkpoint in '
        "Trainer(checkpoint=sparkdl.Checkpoint(path)), which this trainer does not have. Set "
        "checkpoint=, or pass the path of a checkpoint.",
    ),
    parameter_error(
        "resume from nowhere",
        lambda fit: fit(fit.good(), resume=fit.tmp / "nowhere"),
        "there is no checkpoint in {tmp}/nowhere: the folder is empty or does not exist.",
    ),
    Mistake(
        "resume from a file",
        lambda fit: fit(fit.good(), resume=file(fit)),
        CheckpointError,
        "cannot list {tmp}/file: Not a directory.",
    ),
]


@dataclass(frozen=True)
class Resumed:
    """How a run that goes on from a checkpoint differs from the one that wrote it."""

    name: str
    changes: dict[str, Any]
    message: str


RESUMED = [
    Resumed(
        "another model",
        {"model": wide},
        'parameter "0.weight" is [3, 2] here and [1, 2] in the checkpoint; parameter "0.bias" is [3] '
        'here and [1] in the checkpoint; parameter "1.weight" is not in the checkpoint; parameter '
        '"1.bias" is not in the checkpoint',
    ),
    Resumed(
        "another batch size", {"batch_size": 2}, "batch_size is 2 here and 4 in the checkpoint"
    ),
    Resumed("another seed", {"seed": 2}, "seed is 2 here and 0 in the checkpoint"),
    Resumed(
        "another optimizer",
        {"optimizer": torch.optim.Adam},
        "the optimizer is Adam here and SGD in the checkpoint",
    ),
    Resumed(
        "other replicas",
        {"replicas": 3},
        "replicas is 3 here and 2 in the checkpoint; the data is in 3 partitions here and in 2 in "
        "the checkpoint",
    ),
    Resumed("other data", {"rows": 4}, "the data has 4 rows here and 6 in the checkpoint"),
]
DAMAGED = [
    (
        "*/slice-00001*",
        lambda file: file.write_bytes(b"x"),
        'the file "{file}" has 1 bytes instead of …',
    ),
    ("*/slice-00001*", flip, "{folder}: {file}: its bytes were changed (its checksum differs)"),
    ("*/slice-00001*", Path.unlink, 'the file "{file}" is missing'),
    ("*/manifest.json", Path.unlink, "it has no manifest, so it was never completed"),
    (
        "*/manifest.json",
        lambda file: file.write_text("{"),
        "its manifest is not JSON (Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1))",
    ),
    (
        "*/history.safetensors",
        flip,
        ("{folder}: {file}: its bytes were changed (its checksum differs)"),
    ),
]
"""Which file of a checkpoint, what happens to it, and what is said of that."""
