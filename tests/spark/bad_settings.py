"""Mistakes in the parameters of a trainer, and in paths."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bad_inputs import (
    WHOLE,
    Fit,
    Mistake,
    Started,
    data_error,
    locked,
    model_error,
    parameter_error,
)
from pyspark import cloudpickle
from pyspark.sql import functions
from torch import nn

import sparkdl
from sparkdl import CheckpointError
from sparkdl.metrics.named import METRICS

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PARAMETERS = [
    parameter_error(
        "output",
        lambda fit: fit(fit.good(), output=["logits"]),
        "output=['logits']: name a field of what the model returns, or give a function of it, or "
        "None.",
    ),
    parameter_error(
        "keywords that are none",
        lambda fit: fit(fit.good(), features={"input ids": "features"}),
        "features={'input ids': 'features'}: give a mapping from each parameter of forward to the "
        "name of a column.",
    ),
    parameter_error(
        "keywords for a pipeline",
        lambda fit: fit(fit.good(), features={"x": "features"}, engine="gang", strategy="pipeline"),
        'features by keyword with strategy="pipeline": pipeline stages take tensors by position '
        "and pass tensors on. Give a list of columns, and a model that returns only its output.",
    ),
    *[
        parameter_error(
            f"{name}={value!r}",
            lambda fit, name=name, value=value: fit(fit.good(), **{name: value}),
            f"{name}={value!r}: {WHOLE}",
        )
        for name, value in [
            ("batch_size", 0),
            ("batch_size", -1),
            ("batch_size", 2.5),
            ("batch_size", True),
            ("batch_size", None),
            ("batch_size", "32"),
            ("replicas", 0),
            ("slices", 0),
        ]
    ],
    parameter_error(
        "unknown engine",
        lambda fit: fit(fit.good(), engine="shufle"),
        'engine="shufle": use one of local, shuffle, gang, auto. Did you mean "shuffle"?',
    ),
    parameter_error(
        "no features",
        lambda fit: fit(fit.good(), features=[]),
        "features is empty: name at least one column.",
    ),
    parameter_error(
        "features by number",
        lambda fit: fit(fit.good(), features=[0]),
        "features=[0]: give a column name, or a list of names.",
    ),
    parameter_error(
        "label by Column",
        lambda fit: fit(fit.good(), label=3),
        "label=3: give a column name, or a list of names.",
    ),
    parameter_error(
        "loss class",
        lambda fit: fit(fit.good(), loss=nn.MSELoss),
        "loss is the class MSELoss: give an instance, MSELoss().",
    ),
    parameter_error(
        "loss by name",
        lambda fit: fit(fit.good(), loss="mse"),
        "loss is a str: give a function of (output, target), such as torch.nn.MSELoss(), or "
        "sparkdl.ModelLoss() for a model that computes its own.",
    ),
    parameter_error(
        "a model's own loss, and no label",
        lambda fit: fit(fit.good(), label=None, loss=sparkdl.ModelLoss()),
        "loss=ModelLoss() with label=None: a model that computes its own loss needs labels. Name "
        "the label column.",
    ),
    parameter_error(
        "a model's own loss, and two labels with one name",
        lambda fit: fit(fit.good(), label=["label", "n"], loss=sparkdl.ModelLoss()),
        "loss=ModelLoss(labels='labels') with 2 label columns: give a list with one keyword for "
        "each label, or None to pass the labels after the inputs.",
    ),
    parameter_error(
        "a model's own loss, and weights",
        lambda fit: fit(fit.good(), weight="n", loss=sparkdl.ModelLoss()),
        "loss=ModelLoss() with weight: the model returns one loss for all rows together. Leave one "
        "of the two out, or give a loss that is computed from the model's output.",
    ),
    parameter_error(
        "a model's own loss in a pipeline",
        lambda fit: fit(
            fit.good(), engine="gang", strategy="pipeline", loss=sparkdl.ModelLoss(), replicas=2
        ),
        'loss=ModelLoss() with strategy="pipeline": only the last stage has the labels. Give a '
        "loss that is computed from the model's output.",
    ),
    parameter_error(
        "model by state",
        lambda fit: fit(fit.good(), model={}),
        "model is a dict: give a function that builds a torch.nn.Module, or a module.",
    ),
    parameter_error(
        "stop by number",
        lambda fit: fit(fit.good(), stop=10),
        "stop=10: give a trigger, such as sparkdl.max_epoch(10).",
    ),
    parameter_error(
        "trigger of nothing",
        lambda fit: fit(fit.good(), stop=sparkdl.max_epoch(0)),
        "max_epoch(0): give a whole number of at least 1.",
    ),
    parameter_error(
        "schedule that is none",
        lambda fit: fit(fit.good(), schedule=0.1),
        "schedule is a float: give a partial of a torch.optim.lr_scheduler class, such as "
        "partial(StepLR, step_size=10).",
    ),
    parameter_error(
        "callback that is none",
        lambda fit: fit(fit.good(), callbacks=[3]),
        "callback 3 is not a sparkdl.Callback.",
    ),
    parameter_error(
        "callback class",
        lambda fit: fit(fit.good(), callbacks=[Started]),
        "callback Started is a class: give an instance of it.",
    ),
    parameter_error(
        "a callback without its list",
        lambda fit: fit(fit.good(), callbacks=sparkdl.Callback()),
        "callbacks is a Callback: give a list of sparkdl.Callback objects.",
    ),
    parameter_error(
        "seed", lambda fit: fit(fit.good(), seed=0.5), "seed=0.5: give a whole number."
    ),
    parameter_error(
        "all at once",
        lambda fit: fit(fit.good(), batch_size=0, replicas=-2, engine="gpu", features=[]),
        "4 problems:\n"
        "  - features is empty: name at least one column.\n"
        f"  - batch_size=0: {WHOLE}\n"
        f"  - replicas=-2: {WHOLE}\n"
        '  - engine="gpu": use one of local, shuffle, gang, auto.',
    ),
    parameter_error(
        "accumulate=0",
        lambda fit: fit(fit.good(), accumulate=0),
        "accumulate=0: give a whole number of at least 1.",
    ),
    parameter_error(
        "local_steps=0",
        lambda fit: fit(fit.good(), local_steps=0),
        "local_steps=0: give a whole number of at least 1.",
    ),
    parameter_error(
        "batch size of NumPy",
        lambda fit: fit(fit.good(), batch_size=np.float64(4.5)),
        f"batch_size=4.5: {WHOLE}",
    ),
    parameter_error(
        "clip_norm",
        lambda fit: fit(fit.good(), clip_norm=-1),
        "clip_norm=-1: give a number above 0, or None.",
    ),
    parameter_error(
        "clip_value",
        lambda fit: fit(fit.good(), clip_value=0),
        "clip_value=0: give a number above 0, or None.",
    ),
    parameter_error(
        "ema",
        lambda fit: fit(fit.good(), ema=2),
        "ema=2: give a decay between 0 and 1, such as 0.999, or None.",
    ),
    parameter_error(
        "l1",
        lambda fit: fit(fit.good(), l1=-1.0),
        "l1=-1.0: give a number of at least 0, or a mapping of patterns to such numbers.",
    ),
    parameter_error(
        "precision",
        lambda fit: fit(fit.good(), precision="bf61"),
        'precision="bf61": use one of fp32, bf16, fp16. Did you mean "bf16"?',
    ),
    parameter_error(
        "precision by dtype",
        lambda fit: fit(fit.good(), wire=torch.bfloat16),
        "wire=torch.bfloat16: use one of fp32, bf16, fp16.",
    ),
    parameter_error(
        "engine by array",
        lambda fit: fit(fit.good(), engine=np.ones(2)),
        "engine=array([1., 1.]): use one of local, shuffle, gang, auto.",
    ),
    parameter_error(
        "on_nan",
        lambda fit: fit(fit.good(), on_nan="ignore"),
        'on_nan="ignore": use one of raise, skip.',
    ),
    parameter_error(
        "schedule_per",
        lambda fit: fit(fit.good(), schedule_per="epochs"),
        'schedule_per="epochs": use one of iteration, epoch. Did you mean "epoch"?',
    ),
    model_error(
        "schedule_per of no schedule",
        lambda fit: fit(fit.good(), schedule_per="epoch"),
        'schedule_per="epoch" has no effect without a schedule: pass schedule=..., or leave it '
        "out.",
    ),
    parameter_error(
        "bucketing of samples of one length",
        lambda fit: fit(fit.good(), bucketing=16),
        "bucketing=16 groups samples of similar length, but all samples of this data have the same "
        'length: declare the column that varies in length, columns={"...": sparkdl.Sequence()}, or '
        "leave bucketing out.",
        jobs=3,
    ),
    parameter_error(
        "rounded weights",
        lambda fit: fit(fit.good(), local_steps=2, wire="bf16"),
        'wire="bf16" with local_steps=2: with local steps, replicas send weights and optimizer '
        'state, which must not be rounded. Use wire="fp32".',
    ),
    parameter_error(
        "compressed weights",
        lambda fit: fit(fit.good(), local_steps=2, compression=sparkdl.TopK()),
        "compression with local_steps=2: with local steps, replicas send weights and optimizer "
        "state, not gradients. Leave one of the two out.",
    ),
    parameter_error(
        "compression class",
        lambda fit: fit(fit.good(), compression=sparkdl.TopK),
        "compression is the class TopK: give an instance, TopK().",
    ),
    parameter_error(
        "compression by name",
        lambda fit: fit(fit.good(), compression="topk"),
        "compression is a str: give sparkdl.TopK(), sparkdl.PowerSGD(), a function of a "
        "sparkdl.GradBucket, or None.",
    ),
    parameter_error(
        "augment by name",
        lambda fit: fit(fit.good(), augment="flip"),
        "augment is a str: give a function of (*features, rng).",
    ),
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
        "specification of no column",
        lambda fit: fit(fit.good(), columns={"photo": sparkdl.Image()}),
        'columns["photo"] is neither a feature nor a label. Known: features, label.',
    ),
    parameter_error(
        "specification class",
        lambda fit: fit(fit.good(), columns={"label": sparkdl.Sequence}),
        'columns["label"] is the class Sequence: give an instance of it.',
    ),
    parameter_error(
        "class weights by name",
        lambda fit: fit(fit.good(), class_weights="inverse"),
        'class_weights is a str: give "balanced", a list with the weight of each class, or a mapping '
        "{class: weight}, all of at least 0.",
    ),
    parameter_error(
        "no class counts",
        lambda fit: fit(fit.good(), class_weights=[0.0, 0]),
        "class_weights=[0.0, 0]: no sample would count. Give at least one class a weight above 0.",
    ),
    parameter_error(
        "optimizer None",
        lambda fit: fit(fit.good(), optimizer=None),
        "optimizer is None: give a torch.optim class, or a partial of one such as "
        "partial(torch.optim.Adam, lr=1e-3).",
    ),
    parameter_error(
        "metric with a lock",
        lambda fit: fit(fit.good(), validation=sparkdl.Validation(fit.good(), [locked()])),
        'metric "gap" cannot be pickled, so it cannot travel to the executors (TypeError: cannot '
        "pickle '_thread.lock' object). Use a function or class of an importable module, with no "
        "open resource in it.",
    ),
    parameter_error(
        "stop that waits for no validation",
        lambda fit: fit(fit.good(), stop=sparkdl.max_score("accuracy", 0.9)),
        'stop needs the metric "accuracy", and there is no validation: give '
        'validation=sparkdl.Validation(data, metrics=["accuracy"]).',
    ),
    parameter_error(
        "stop that waits for another metric",
        lambda fit: fit(
            fit.good(),
            stop=sparkdl.plateau("mea", 2),
            validation=sparkdl.Validation(fit.good(), metrics=["mae"]),
        ),
        'stop needs the metric "mea", which the validation does not have. Did you mean "mae"? It '
        "has: loss, mae.",
    ),
    parameter_error(
        "validation that is a DataFrame",
        lambda fit: fit(fit.good(), validation=fit.good()),
        "validation is a DataFrame: give sparkdl.Validation(data, metrics=[...]).",
    ),
    data_error(
        "validation on a list",
        lambda fit: fit(fit.good(), validation=sparkdl.Validation([1.0])),
        "validation data: fit takes a DataFrame or an RDD, not builtins.list. Make one with "
        "spark.createDataFrame(rows, schema) or spark.sparkContext.parallelize(samples).",
    ),
    parameter_error(
        "metric of the validation",
        lambda fit: fit(fit.good(), validation=sparkdl.Validation(fit.good(), metrics=["acuracy"])),
        'unknown metric "acuracy". Did you mean "accuracy"? '
        f"Known: {', '.join(['loss', *METRICS])}, or a sparkdl.Metric or torchmetrics.Metric.",
    ),
    parameter_error(
        "best of no metric",
        lambda fit: fit(fit.good(), validation=sparkdl.Validation(fit.good(), best="mae")),
        'Validation(best="mae") is not one of its metrics: loss.',
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
        "checkpoints below a file",
        lambda fit: fit(fit.good(), checkpoint=sparkdl.Checkpoint(file(fit) / "run")),
        CheckpointError,
        "cannot make the folder {tmp}/file/run: Not a directory. Give Checkpoint(path) a "
        "folder that can be written, on a file system that the driver and all executors "
        "share.",
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
        "checkpoints without a path",
        lambda fit: fit(fit.good(), checkpoint=sparkdl.Checkpoint(" ", keep=0)),
        "2 problems:\n"
        "  - Checkpoint path=' ': give a folder, such as \"/shared/run-1\" or "
        '"s3://bucket/run-1".\n'
        "  - Checkpoint keep=0: give a whole number of at least 1, or None for all.",
    ),
    parameter_error(
        "checkpoint by path",
        lambda fit: fit(fit.good(), checkpoint="/shared/run"),
        'checkpoint is a str: give sparkdl.Checkpoint("path").',
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
    parameter_error(
        "weights that are not there",
        lambda fit: fit(fit.good(), weights=fit.tmp / "none"),
        'weights="{tmp}/none" cannot be read as a safetensors file (No such file or '
        "directory). Give its path, or a state_dict.",
    ),
    parameter_error(
        "weights of another format",
        lambda fit: fit(fit.good(), weights=file(fit)),
        'weights="{tmp}/file" cannot be read as a safetensors file (it is too '
        "short for a safetensors file). Give its path, or a state_dict.",
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
